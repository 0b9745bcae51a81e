"""EleutherAI's harness on paxlite's weights and, through its own class, on transformers'."""

import json
import math
import random

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.eval.zero_shot import contexts_of
from paxlite.files.text_files import read_text
from tests.support import harness_draws as draws
from tests.support.imported import run_import

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

TASKS = {
  'choose': dict(
    output_type='multiple_choice', doc_to_text='{{context}}', doc_to_choice='{{options}}',
    doc_to_target='{{answer}}', metric_list=[dict(metric='acc'), dict(metric='acc_norm')],
  ),
  'whole': dict(
    output_type='loglikelihood_rolling', doc_to_text='', doc_to_target='{{text}}',
    metric_list=[dict(metric='word_perplexity'), dict(metric='bits_per_byte')],
  ),
  'write': dict(
    output_type='generate_until', doc_to_text='{{context}}', doc_to_target='{{next}}',
    generation_kwargs=dict(until=['\n\n'], max_gen_toks=12, do_sample=False),
    metric_list=[dict(metric='exact_match', aggregation='mean', higher_is_better=True)],
  ),
}  # fmt: skip


slow = pytest.mark.slow


@pytest.fixture(scope='module', autouse=True)
def libraries():
  for name in ('torch._dynamo', 'lm_eval'):  # the first before TensorFlow: see test_seqio
    pytest.importorskip(name)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A tiny Llama of random weights with a tokenizer, a data file and three tasks for it."""
  from tokenizers import ByteLevelBPETokenizer

  folder = tmp_path_factory.mktemp('lm_eval')
  text = read_text(packaged.TEXTS[0])[:200_000]
  bpe = ByteLevelBPETokenizer()
  bpe.train_from_iterator([text], vocab_size=400, special_tokens=['<s>', '</s>'])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=400, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    initializer_range=0.3,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(folder / 'hf')
  bpe.save(str(folder / 'hf' / 'tokenizer.json'))
  names = dict(tokenizer_class='PreTrainedTokenizerFast', eos_token='</s>')
  (folder / 'hf' / 'tokenizer_config.json').write_text(json.dumps(names))
  run_import('hf', folder / 'hf', folder / 'w')

  words = text.split()
  records = []
  for i in range(7):
    part = words[40 * i : 40 * i + 40]
    options = [' '.join(part[12:n]) for n in (13, 15, 18)]
    records.append(
      dict(context=' '.join(part[:12]), options=options, answer=i % 3, next=part[12],
           text=' '.join(part * (1 + i % 2)))
    )  # fmt: skip
  (folder / 'records.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  for name, fields in TASKS.items():
    task = dict(
      task=name, dataset_path='json', test_split='test', **fields,
      dataset_kwargs=dict(data_files=dict(test=str(folder / 'records.jsonl'))),
    )  # fmt: skip
    (folder / f'{name}.yaml').write_text(json.dumps(task))
  return folder


@pytest.fixture(scope='module')
def both(folder, tmp_path_factory):
  """The harness's results for paxlite's weights, and for the same weights in transformers."""
  import datasets
  import lm_eval
  from lm_eval.models.huggingface import HFLM
  from lm_eval.tasks import TaskManager

  from paxlite.eval.commands.lm_eval import PaxliteLM

  datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp('cache')
  ours = PaxliteLM(checkpoint=str(folder / 'w'), batch_tokens=256, DECODE_BATCH_SIZE=4)
  theirs = HFLM(pretrained=str(folder / 'hf'), device='cpu', dtype='float32', max_length=64)
  manager = TaskManager(include_path=str(folder), include_defaults=False)
  run = lambda model: lm_eval.simple_evaluate(
    model, tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0
  )
  return run(ours), run(theirs)


def responses(found, task: str) -> list:
  samples = sorted(found['samples'][task], key=lambda s: s['doc_id'])
  return [s['filtered_resps'] for s in samples]


@slow
def test_log_likelihoods_are_theirs(both):
  ours, theirs = (responses(found, 'choose') for found in both)
  assert len(ours) == 7
  for a, b in zip(ours, theirs, strict=True):
    for (log_p, greedy), (their_log_p, their_greedy) in zip(a, b, strict=True):
      assert math.isclose(log_p, their_log_p, abs_tol=1e-3)
      assert greedy == their_greedy


@slow
def test_whole_texts_are_as_likely_as_theirs(both):
  for a, b in zip(*(responses(found, 'whole') for found in both), strict=True):
    assert math.isclose(a[0], b[0], rel_tol=1e-4)


@slow
def test_greedy_texts_are_theirs(both):
  ours, theirs = (responses(found, 'write') for found in both)
  assert ours == theirs
  assert any(text.strip() for (text,) in ours)


@slow
def test_metrics_are_theirs(both):
  ours, theirs = (found['results'] for found in both)
  for task, metrics in theirs.items():
    for name, value in metrics.items():
      if isinstance(value, float):
        assert math.isclose(ours[task][name], value, rel_tol=1e-4), (task, name)


def models(folder, name: str):
  """Returns paxlite's and the harness's model of the same random weights, with a tokenizer."""
  from lm_eval.models.huggingface import HFLM

  from paxlite.eval.commands.lm_eval import PaxliteLM

  draws.write_tokenizer(folder / 'hf', name, read_text(packaged.TEXTS[0])[:50_000])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=draws.SIZE, hidden_size=32, intermediate_size=56, num_hidden_layers=1,
    num_attention_heads=4, max_position_embeddings=draws.POSITIONS, bos_token_id=0, eos_token_id=1,
    initializer_range=0.5,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(folder / 'hf')
  run_import('hf', folder / 'hf', folder / 'w')
  ours = PaxliteLM(checkpoint=str(folder / 'w'), batch_tokens=512, DECODE_BATCH_SIZE=4)
  return ours, HFLM(pretrained=str(folder / 'hf'), device='cpu', dtype='float32', batch_size=1)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'count'),
  [('bytes, BOS by both', 12), *(pytest.param(name, 30, marks=slow) for name in draws.TOKENIZERS)],
)
def test_drawn_requests_are_answered_as_by_the_harness(name, count, tmp_path):
  from lm_eval.api.instance import Instance

  ours, theirs = models(tmp_path, name)
  assert ours.max_length == theirs.max_length == draws.POSITIONS
  rng = random.Random(f'{name} {count}')
  words = read_text(packaged.TEXTS[0])[:5_000].split()
  rendered = []
  for chat, begins in draws.chats(rng, words):
    text = ours.apply_chat_template(chat, begins)
    assert text == theirs.apply_chat_template(chat, begins)
    assert ours.tok_encode(text) == theirs.tok_encode(text)
    rendered.append(text)
  drawn = draws.requests(rng, words, rendered, count)
  contexts = contexts_of(ours._inference)  # those of the native tasks
  for context, continuation in (args for kind, args in drawn if kind == 'loglikelihood'):
    their_pair = theirs._encode_pair(context, continuation) if context else ()
    if their_pair and all(their_pair):
      pair = contexts.pair(context, None, continuation)
      assert (list(pair.context), list(pair.continuation)) == their_pair
  for kind in ('loglikelihood', 'loglikelihood_rolling', 'generate_until'):
    asked = [Instance(kind, {}, args, i) for i, (k, args) in enumerate(drawn) if k == kind]
    answers, expected = (getattr(lm, kind)(asked, disable_tqdm=True) for lm in (ours, theirs))
    assert len(asked) >= count // 6
    for request, answer, right in zip(asked, answers, expected, strict=True):
      if kind == 'generate_until':
        assert answer == right, request.args
      elif kind == 'loglikelihood':
        assert math.isclose(answer[0], right[0], abs_tol=1e-3), request.args
        assert answer[1] == right[1], request.args
      else:
        assert math.isclose(answer, right, abs_tol=1e-3), request.args

  for arguments, match in (
    (dict(max_gen_toks=draws.POSITIONS), 'leaves no room for a prompt'),
    (dict(num_beams=4), 'num_beams=4 is not supported'),
    (dict(do_sample=True), 'do_sample=True needs a temperature above 0'),
  ):
    with pytest.raises(UserError, match=match):
      ours.generate_until([Instance('generate_until', {}, ('a', arguments), 0)])
