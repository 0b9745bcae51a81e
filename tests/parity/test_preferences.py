"""Losses of preferences and their gradients beside those of trl, for the same pairs of answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.finetuning.preferences.kto_loss import Kto
from paxlite.finetuning.preferences.labelled_answers import nearest_other
from paxlite.finetuning.preferences.preference_losses import ChosenLoss, Dpo, OddsRatio, SimPo
from paxlite.layers.sown import SOWN
from paxlite.losses.outputs import Outputs
from tests.parity.test_families import _their_gradients
from tests.support.families import theirs
from tests.support.imported import flat, loaded, run_import, unrolled

pytestmark = pytest.mark.slow
torch = pytest.importorskip('torch')
trl = pytest.importorskip('trl')

CASE, T = 'smollm3', 24
# the prompt and both answers of each pair, in numbers of tokens
SIZES = (5, 7, 4), (3, 2, 6), (4, 3, 3)
TEXTS = [{'prompt': 'a b', 'chosen': 'c d', 'rejected': 'b a'}] * 2


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """The trained model and the reference, as transformers has them and imported."""
  folder = tmp_path_factory.mktemp('models')
  found = []
  for seed in (0, 1):
    model = theirs(CASE, seed)
    model.save_pretrained(folder / f'hf{seed}')
    run_import('hf', folder / f'hf{seed}', folder / f'w{seed}')
    found.append((model, *loaded(folder / f'w{seed}')))
  return found


@pytest.fixture(scope='module')
def answers():
  """Token ids of a chosen and a rejected answer, each with its prompt and the prompt's length."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(3, 96, n)
  found = []
  for prompt, chosen, rejected in SIZES:
    start = draw(prompt)
    found.append([(np.concatenate([start, draw(n)]), prompt) for n in (chosen, rejected)])
  return found


def packed(answers):
  """Returns the batch that preference_rows.py would make of these pairs, two of them in a row."""
  rows = [[*answers[0], *answers[1]], answers[2]]
  keys = 'ids', 'labels', 'segment_ids', 'segment_pos', 'preferences'
  batch = {key: np.zeros((2, 40), np.int32) for key in keys}
  batch['weights'] = np.zeros((2, 40), np.float32)
  for r, row in enumerate(rows):
    start = 0
    for segment, (ids, prompt) in enumerate(row, 1):
      part = slice(start, start + len(ids) - 1)
      batch['ids'][r, part], batch['labels'][r, part] = ids[:-1], ids[1:]
      batch['segment_ids'][r, part] = segment
      batch['segment_pos'][r, part] = np.arange(len(ids) - 1)
      batch['preferences'][r, part] = 1 if segment % 2 else -1
      batch['weights'][r, start + prompt - 1 : part.stop] = 1
      start = part.stop
  return batch


def inputs_of_trl(answers):
  """Returns the same for trl: all chosen answers, then all rejected ones, padded."""
  ids = [pair[k] for k in range(len(answers[0])) for pair in answers]
  found = {k: torch.zeros((len(ids), T), dtype=torch.long) for k in ('input_ids', 'attention_mask')}
  found['completion_mask'] = torch.zeros((len(ids), T), dtype=torch.long)
  for i, (tokens, prompt) in enumerate(ids):
    found['input_ids'][i, : len(tokens)] = torch.tensor(tokens)
    found['attention_mask'][i, : len(tokens)] = 1
    found['completion_mask'][i, prompt : len(tokens)] = 1
  return found


def tokenizer():
  tokenizers = pytest.importorskip('tokenizers')
  transformers = pytest.importorskip('transformers')
  words = {word: i for i, word in enumerate(['<pad>', '<eos>', 'a', 'b', 'c', 'd'])}
  of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='a'))
  of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=of_words, pad_token='<pad>', eos_token='<eos>'
  )


def ours(models, batch, losses):
  """Returns the loss, its gradients by name, and the metrics of the first of `losses`."""
  (_, _, model, params), (_, _, _, fixed) = models
  batch = {k: jnp.asarray(v) for k, v in batch.items()}
  outputs = lambda p, **more: Outputs(model.bind({'params': p}, mutable=list(SOWN)), batch, **more)

  def value(params):
    made = outputs(params, reference=lambda: outputs(fixed))
    total = sum(loss.coefficient * loss(made, batch) / loss.weight(batch) for loss in losses)
    return total, losses[-1].metrics(made, batch)

  with jax.default_matmul_precision('highest'):
    (found, metrics), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
  return (
    float(found),
    unrolled(flat(grads)),
    {k: float(getattr(m, 'value', m)) for k, m in metrics.items()},
  )


def compare(models, batch, losses, trainer, expected, logged):
  found, grads, metrics = ours(models, batch, losses)
  assert found == pytest.approx(float(expected.detach()), rel=1e-5)
  model, experiment = models[0][:2]
  model.zero_grad()
  expected.backward()
  before = {n: p.data.clone() for n, p in model.named_parameters()}
  wanted_grads = _their_gradients(model, experiment)
  for name, parameter in model.named_parameters():
    parameter.data = before[name]
  largest = max(np.abs(x).max() for x in wanted_grads.values())
  for name, wanted in wanted_grads.items():
    np.testing.assert_allclose(grads[name], wanted, rtol=0, atol=1e-5 * largest, err_msg=name)
  for name, value in metrics.items():
    assert value == pytest.approx(logged[name], rel=1e-5, abs=1e-6), name


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('kind', ['sigmoid', 'hinge', 'ipo', 'robust'])
def test_dpo_is_that_of_trl(kind, models, answers, tmp_path):
  config = trl.DPOConfig(
    str(tmp_path), loss_type=kind, beta=0.3, label_smoothing=0.2 * (kind == 'robust'),
    report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_dropout=True,
  )  # fmt: skip
  datasets = pytest.importorskip('datasets')
  trainer = trl.DPOTrainer(
    models[0][0], models[1][0], config, train_dataset=datasets.Dataset.from_list(TEXTS),
    processing_class=tokenizer(),
  )  # fmt: skip
  expected = trainer._compute_loss(models[0][0], inputs_of_trl(answers), False)
  logged = {k: v[-1] for k, v in trainer._metrics['eval'].items()}
  loss = Dpo(kind=kind, beta=0.3, flipped=0.2)
  compare(models, packed(answers), [loss], trainer, expected, logged)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('kind', ['orpo', 'simpo'])
def test_a_loss_without_reference_is_that_of_trl(kind, models, answers, tmp_path):
  """ORPO adds the cross-entropy of the chosen answers and their prompts."""
  common = dict(report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False)
  if kind == 'orpo':
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    cls, config = ORPOTrainer, ORPOConfig(str(tmp_path), beta=0.3, **common)
    losses = [ChosenLoss(), OddsRatio(beta=0.3)]
  else:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    values = dict(loss_type='simpo', beta=1.5, simpo_gamma=0.5, cpo_alpha=0.0)
    cls, config = CPOTrainer, CPOConfig(str(tmp_path), **values, **common)
    losses = [SimPo(beta=1.5, gamma=0.5)]
  datasets = pytest.importorskip('datasets')
  trainer = cls(
    models[0][0], config, train_dataset=datasets.Dataset.from_list(TEXTS),
    processing_class=tokenizer(),
  )  # fmt: skip
  found = inputs_of_trl(answers)
  batch = {}
  for name, part in (('chosen', slice(0, 3)), ('rejected', slice(3, 6))):
    ids, mask = found['input_ids'][part], found['attention_mask'][part]
    labels = ids.masked_fill(found['completion_mask'][part] == 0, -100)
    batch |= {f'{name}_input_ids': ids, f'{name}_attention_mask': mask, f'{name}_labels': labels}
  expected, logged = trainer.get_batch_loss_metrics(models[0][0], batch)
  logged = {k: float(v) for k, v in logged.items()}
  compare(models, packed(answers), losses, trainer, expected, logged)


def test_kto_is_that_of_trl(models, answers, tmp_path):
  """The answers to other prompts are those that trl finds in a batch: of the one before."""
  labels = [True, False, True]
  singles = [pair[not good] for pair, good in zip(answers, labels, strict=True)]
  others = [
    (np.concatenate([ids[:prompt], singles[i][0][singles[i][1] :]]), prompt)
    for (ids, prompt), i in zip(
      singles, (nearest_other(range(3), k) for k in range(3)), strict=True
    )
  ]
  config = trl.KTOConfig(
    str(tmp_path), beta=0.3, desirable_weight=1.5, undesirable_weight=0.7, report_to=[],
    use_cpu=True, bf16=False, gradient_checkpointing=False, disable_dropout=True,
    per_device_train_batch_size=3,
  )  # fmt: skip
  datasets = pytest.importorskip('datasets')
  texts = [dict(prompt='a b', completion='c d', label=good) for good in labels]
  trainer = trl.KTOTrainer(
    models[0][0], models[1][0], config, train_dataset=datasets.Dataset.from_list(texts),
    processing_class=tokenizer(),
  )  # fmt: skip
  own, mixed = (inputs_of_trl([[a] for a in part]) for part in (singles, others))
  inputs = own | {f'KL_{k}': v for k, v in mixed.items()} | {'label': torch.tensor(labels)}
  expected = trainer._compute_loss(models[0][0], inputs, False)
  logged = {k: v[-1] for k, v in trainer._metrics['eval'].items()}
  batch = packed([list(both) for both in zip(singles, others, strict=True)])
  of_segments = np.array([[0, 1, 2, -1, -2], [0, 1, 2, 0, 0]], np.int32)  # of each row
  batch['preferences'] = np.take_along_axis(of_segments, batch['segment_ids'], 1)
  loss = Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
  compare(models, batch, [loss], trainer, expected, logged)
  assert logged['kl'] > 0
