"""Cached decoding equals recomputation; sampling, stopping, and files of prompts."""

import json
import signal
import subprocess
import time

import fiddle as fdl
import jax
import numpy as np
import pytest
from fiddle import selectors
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval.scoring import Continuation, Scorer
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.llama import LLaMA
from paxlite.generation.decoding import Generator, Sampling, bucket
from paxlite.layers.attention.attention import Attention
from tests.support import runs

SMALL = dict(NUM_LAYERS=2, NUM_HEADS=4, MODEL_DIMS=32, VOCAB_SIZE=97, MAX_SEQ_LEN=64,
             FPROP_DTYPE='float32')  # fmt: skip
LLAMA = SMALL | dict(NUM_KV_HEADS=2, HIDDEN_DIMS=48)
MODELS = {
  'gpt': GPT126M(**SMALL),
  'llama': LLaMA(**LLAMA, USE_REPEATED_LAYER=False),
  'repeated': LLaMA(**LLAMA),
  'window': LLaMA(**LLAMA, USE_REPEATED_LAYER=False, SLIDING_WINDOW=6),
  'glam': GLaM126M64E(**SMALL, NUM_EXPERTS=4, USE_DROPLESS_MOE=True, USE_REPEATED_LAYER=True),
  'pipeline': LLaMA(
    **LLAMA, MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1]
  ),
  'bfloat16': LLaMA(**(LLAMA | dict(FPROP_DTYPE='bfloat16')), USE_REPEATED_LAYER=False),
}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13], [4]]


def made(name: str):
  model = fdl.build(MODELS[name].build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  return model, params


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize(
  'name',
  ['window']
  + [
    pytest.param(n, marks=pytest.mark.slow)
    for n in ('gpt', 'llama', 'pipeline', 'repeated', 'glam')
  ],
)
def test_the_cache_gives_what_recomputing_gives(name):
  """The tokens of every row are equal, in a batch of different lengths and alone."""
  model, params = made(name)
  generator = Generator(model, params, 64)
  rows = generator.generate(PROMPTS, 16)
  apply = jax.jit(model.apply)
  for prompt, row in zip(PROMPTS, rows, strict=True):
    whole = np.array([prompt + row + [0] * 16])[:, :32]  # one program for all
    logits = apply({'params': params}, whole)[0, len(prompt) - 1 : len(prompt) + 15]
    assert logits.argmax(-1).tolist() == row
  assert list(generator.stream(PROMPTS[1], 16)) == rows[1]
  state = generator.prefill(PROMPTS, 16)
  slot = int(state.slot)
  assert int(generator.extend(state, 5).slot) == slot + 5


class Interpolated(Attention):
  """A user's attention, which turns queries and keys by other positions."""

  def __call__(self, x_BTD, positions_BT, segment_ids_BT=None):
    return super().__call__(x_BTD, positions_BT // 4, segment_ids_BT)


@pytest.mark.slow
def test_what_a_token_sees_does_not_depend_on_the_positions_of_a_layer():
  config = MODELS['llama'].build_task()
  for layer in selectors.select(config.model, Attention):
    fdl.update_callable(layer, Interpolated)
  model = fdl.build(config).model
  _, params = made('llama')
  (row, *_) = Generator(model, params, 64).generate(PROMPTS, 8)
  logits = model.apply({'params': params}, np.array([[*PROMPTS[0], *row]]))[0]
  assert logits[len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist() == row


@pytest.mark.slow
def test_bfloat16_takes_the_likeliest_but_for_rounding():
  """Without a cache, each token's logit is the largest, or below it by 2 of its last bits."""
  model, params = made('bfloat16')
  rows = Generator(model, params, 64).generate(PROMPTS, 8)
  for prompt, row in zip(PROMPTS, rows, strict=True):
    assert len(row) == 8
    logits = model.apply({'params': params}, np.array([[*prompt, *row]]))[0, len(prompt) - 1 : -1]
    logits = np.asarray(logits, np.float32)
    chosen, largest = logits[np.arange(8), row], logits.max(-1)
    assert (largest - chosen <= 2 * 2.0**-7 * np.abs(largest)).all()


def test_one_program_for_all_lengths_of_a_bucket():
  model, params = made('llama')
  generator = Generator(model, params, 64)
  for length, new in ((1, 3), (7, 20), (30, 32)):
    generator.generate([list(range(3, 3 + length))], new)
  assert generator._prefill._cache_size() == 1
  assert generator._extend._cache_size() == 1
  assert [bucket(n) for n in (1, 32, 33, 1000)] == [32, 32, 64, 1024]


@pytest.mark.slow
@pytest.mark.parametrize(
  'sampling',
  [
    pytest.param(Sampling(temperature=0.7), marks=pytest.mark.slow),
    Sampling(1.0, top_k=5, top_p=0.8, repetition_penalty=1.3),
  ],
)
def test_a_seed_fixes_a_row_in_any_batch(sampling):
  model, params = made('llama')
  generator = Generator(model, params, 64, sampling)
  rows = generator.generate(PROMPTS, 12, seed=3)
  assert rows == generator.generate(PROMPTS, 12, seed=3)
  assert rows != generator.generate(PROMPTS, 12, seed=4)
  assert rows[1:] == generator.generate(PROMPTS[1:], 12, seed=3, row_ids=[1, 2])


def test_the_filters_are_those_of_transformers():
  torch = pytest.importorskip('torch')
  from transformers.generation import logits_process as theirs

  scores = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32) * 3
  ours = Sampling(temperature=0.6, top_k=12, top_p=0.7).filtered(scores)
  expected = torch.tensor(scores)
  for process in (
    theirs.TemperatureLogitsWarper(0.6), theirs.TopKLogitsWarper(12), theirs.TopPLogitsWarper(0.7)
  ):  # fmt: skip
    expected = process(None, expected)
  np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_repetition_penalty_and_eos_as_in_transformers(tmp_path):
  torch = pytest.importorskip('torch')
  from tests.parity.test_weights import loaded, run_import, their_model

  theirs = their_model('llama_gqa_tied')
  theirs.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  _, model, params = loaded(tmp_path / 'w')
  prompt = [5, 9, 11, 5]
  plain = Generator(model, params, 64, Sampling(repetition_penalty=1.5)).generate([prompt], 20)[0]
  for eos in (None, plain[6]):
    with torch.no_grad():
      out = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5,
        eos_token_id=eos, pad_token_id=0,
      )[0, 4:].tolist()  # fmt: skip
    ids = [] if eos is None else [eos]
    ours = Generator(model, params, 64, Sampling(repetition_penalty=1.5), eos_ids=ids)
    assert ours.generate([prompt], 20)[0] == (out[: out.index(eos)] if eos in out else out)


@pytest.mark.slow
def test_ids_without_a_token_are_never_drawn():
  model, params = made('llama')
  is_token = np.arange(params['embedding']['emb_var'].shape[0] - 9) % 7 == 3
  generator = Generator(model, params, 64, Sampling(temperature=9.0), is_token=is_token)
  drawn = {i for row in generator.generate([[1]] * 4, 30) for i in row}
  assert len(drawn) > 1
  assert drawn <= set(np.flatnonzero(is_token).tolist())


@pytest.mark.parametrize(
  ('prompt', 'new', 'match'),
  [
    ([], 1, 'a prompt is empty'),
    (list(range(64)), 1, 'leaves no room'),
    ([1], 0, 'must be at least 1'),
  ],
)
def test_prompts_that_cannot_be_continued(prompt, new, match):
  model, params = made('llama')
  with pytest.raises(UserError, match=match):
    Generator(model, params, 64).generate([prompt], new)


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('gpt', marks=pytest.mark.slow), 'llama'])
def test_a_batch_gives_each_prompt_what_it_gets_alone(name):
  """For all lengths of neighbors, the number of tokens and the tokens are the same."""
  model, params = made(name)
  prompts = [[7], list(range(3, 66)), list(range(10, 40)), [5, 6], list(range(63))]
  for most in (100, 20):
    generator = Generator(model, params, 64)
    rows = generator.generate(prompts, most)
    assert [len(r) for r in rows] == [min(most, 64 - len(p)) for p in prompts]
    assert rows == [generator.generate([p], most)[0] for p in prompts]
  sampled = Generator(model, params, 64, Sampling(1.0, top_k=9))
  rows = sampled.generate(prompts, 100, seed=5)
  assert rows == [sampled.generate([p], 100, 5, row_ids=[i])[0] for i, p in enumerate(prompts)]


@pytest.mark.cases(fast=2, slow=4)
@pytest.mark.parametrize(
  ('ids', 'match'),
  [
    ([1, 97], 'has the id 97 at position 1: the ids of the vocabulary are 0 to 96'),
    ([1, 2, -1], 'has the id -1 at position 2'),
    ([2**40], f'has the id {2**40} at position 0'),
    ([1.5], 'must be a list of token ids'),
    (['a'], 'must be a list of token ids'),
    ([[1]], 'must be a list of token ids'),
  ],
)
def test_ids_outside_the_vocabulary_are_refused(ids, match):
  model, params = made('llama')
  with pytest.raises(UserError, match=f'prompt 1 {match}'):
    Generator(model, params, 64).generate([[1], ids], 3)
  scorer = Scorer(model, params, 64)
  with pytest.raises(UserError, match=f'continuation 1 {match}'):
    scorer([Continuation([1], [2]), Continuation(ids, [1])])


class Speaker(Synthetic, LLaMA):
  """Random weights with a tokenizer; the text is nonsense, but always the same."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 8192
  VOCAB_PATH: str = packaged.VOCAB
  MAX_SEQ_LEN = 64
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False
  PERCORE_BATCH_SIZE = 2
  MAX_STEPS = 1
  DECODE_BATCH_SIZE = 2
  MAX_DECODE_STEPS = 6


CONFIG = 'tests.unit.generation.test_decoding.Speaker'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('speaker')
  runs.run(folder, config=CONFIG)
  return folder


def prompts(tmp_path, count: int = 7) -> str:
  path = tmp_path / 'prompts.jsonl'
  lines = [json.dumps(dict(inputs='And it came to pass ' * (i % 3 + 1), n=i)) for i in range(count)]
  path.write_text('\n'.join(lines))
  return f"--fdl.DECODE_FILES=['{path}']"


@pytest.mark.slow
def test_a_file_of_prompts_and_an_interrupted_one(trained, tmp_path):
  """Finished prompts are not decoded again after a kill. The same holds on 8 devices."""
  import shutil

  folder = tmp_path / 'run'
  shutil.copytree(trained, folder)
  flag = prompts(tmp_path)
  runs.run(folder, '--mode=decode', flag, config=CONFIG)
  whole = (folder / 'decoded_00000001.jsonl').read_text()
  records = [json.loads(line) for line in whole.splitlines()]
  assert [r['n'] for r in records] == list(range(7))
  assert all(r['prediction'] for r in records)

  (folder / 'decoded_00000001.jsonl').unlink()
  partial = folder / 'decoded_00000001.jsonl.partial'
  process = subprocess.Popen(
    runs.command(folder, '--mode=decode', flag, config=CONFIG),
    cwd=runs.ROOT, env=runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  while process.poll() is None and not (partial.exists() and partial.stat().st_size):
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  if partial.exists():
    with partial.open('a') as f:
      f.write('{"prompt": 5, "predi')  # like a kill during a write
  result = runs.run(folder, '--mode=decode', flag, config=CONFIG)
  assert (folder / 'decoded_00000001.jsonl').read_text() == whole
  assert '7 prompts continued' in result.stdout
  assert '7 of them now' not in result.stdout
  assert not partial.exists()
  again = runs.run(folder, '--mode=decode', flag, '--fdl.TOP_K=3', config=CONFIG, code=2)
  assert 'was decoded with other settings: TOP_K 0 → 3' in again.stderr
  prompts(tmp_path, count=1)
  again = runs.run(folder, '--mode=decode', flag, config=CONFIG, code=2)
  assert 'was decoded with other settings: prompts ' in again.stderr
  prompts(tmp_path)

  (folder / 'decoded_00000001.jsonl').unlink()
  runs.run(
    folder, '--mode=decode', flag, '--fdl.ICI_MESH_SHAPE=[1,4,2]', '--fdl.PERCORE_BATCH_SIZE=0.5',
    config=CONFIG, devices=8,
  )  # fmt: skip
  assert (folder / 'decoded_00000001.jsonl').read_text() == whole


@pytest.mark.slow
def test_the_kernels_are_checked_before_weights_are_read(trained, monkeypatch):
  from paxlite.eval import inference

  def refuse(experiment, mesh):
    assert mesh.size == 1
    raise UserError(f'wrong for {experiment.MODEL_DIMS}')

  monkeypatch.setattr(inference, 'check_attention', refuse)
  with pytest.raises(UserError, match='wrong for'):
    inference.load_checkpoint(str(trained))


@pytest.mark.slow
def test_generate_streams_the_same_text(trained, tmp_path):
  runs_as = lambda *flags: runs.module(
    'paxlite', 'generate', f'--checkpoint={trained}', *flags,
    '--import=tests.unit.generation.test_decoding', code=None,
  )  # fmt: skip
  result = runs_as('--prompt=And it came to pass ', '--max_new_tokens=6')
  assert result.returncode == 0, result.stderr
  from paxlite.eval.inference import load_checkpoint

  inference = load_checkpoint(str(trained))
  ids = inference.encode('And it came to pass ')
  expected = inference.generator().generate([ids], 6)[0]
  assert result.stdout == inference.tokenizer.decode(expected) + '\n'

  for flags, message in (
    ([], 'error: PROMPT is missing'),
    (['--prompt=a', '--system=b'], 'error: --system needs --chat'),
    (['--prompt=a', '--top_p=2'], 'error: top_p=2 must be above 0'),
    (['--prompt=' + 'word ' * 100], 'leaves no room for a new token'),
    (['--prompt=a', '--chat'], 'comes with no chat template'),
    (['--prompt=a', '--tokenizer=/nowhere'], 'is not a file'),
  ):
    result = runs_as(*flags)
    assert result.returncode == 2, flags
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_tokenizer_of_another_model(trained, tmp_path):
  from paxlite.data.tokenizer import check_vocabulary

  tokenizer = open_tokenizer(packaged.VOCAB)
  for size in (8000, 32000):
    with pytest.raises(UserError, match='it is the tokenizer of another model'):
      check_vocabulary(tokenizer, size)
  check_vocabulary(tokenizer, 8320)


@pytest.mark.slow
def test_other_weights_do_not_mix_with_what_was_decoded(trained, tmp_path):
  flags = [prompts(tmp_path, 2), f'--fdl.CHECKPOINT_RESTORE_PATH={trained}']
  runs.run(tmp_path / 'run', '--mode=decode', *flags, config=CONFIG)
  other = tmp_path / 'other'
  runs.run(other, '--fdl.SEED=9', config=CONFIG)
  flags[1] = f'--fdl.CHECKPOINT_RESTORE_PATH={other}'
  result = runs.run(tmp_path / 'run', '--mode=decode', *flags, config=CONFIG, code=2)
  assert 'was decoded with other settings: weights ' in result.stderr


@pytest.mark.parametrize(
  ('record', 'match'),
  [
    (dict(inputs='a', prediction='b'), 'has a "prediction" already'),
    (dict(text='a'), 'has neither'),
    (dict(messages=[]), '"messages" must be a list'),
    (
      dict(messages=[dict(role='user', content=None)]),
      'the message of the user has no text "content"',
    ),
    (dict(messages=[dict(role='user', content='a')]), 'comes with no chat template'),
  ],
)
def test_a_bad_prompt_is_named(record, match, trained, tmp_path):
  from paxlite.eval.inference import load_checkpoint, read_prompts

  path = tmp_path / 'p.jsonl'
  path.write_text(json.dumps(dict(inputs='a', index=3)) + '\n' + json.dumps(record) + '\n')
  with pytest.raises(UserError, match=rf'p\.jsonl:2.*{match}'):
    read_prompts([str(path)], load_checkpoint(str(trained)))


def test_decode_without_prompts_or_weights(trained, tmp_path):
  result = runs.run(tmp_path / 'new', '--mode=decode', prompts(tmp_path), config=CONFIG, code=2)
  assert 'holds no checkpoint: train first' in result.stderr
  result = runs.run(trained, '--mode=decode', config=CONFIG, code=2)
  assert '--fdl.DECODE_FILES' in result.stderr
