"""Runs that learn from rewards of their own answers."""

import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.rollout_datasets import PromptFiles
from tests.support import runs

REWARDS = 'tests.unit.reinforcement.my_rewards'


class Letters(PromptFiles, LLaMA):
  """A tiny model with a token for each letter, rewarded for writing a."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 16
  START_ID = 1
  MAX_SEQ_LEN = 16
  MAX_NEW_TOKENS = 6
  FPROP_DTYPE = 'float32'
  REWARDS = ['tests.runs.test_rollouts.share_of_a']
  GROUP_SIZE = 4
  PERCORE_BATCH_SIZE = 16
  LEARNING_RATE = 3e-3
  LR_SCHEDULE = 'constant'
  MAX_STEPS = 6
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 100
  CHAT_TEMPLATE = (
    '{% for m in messages %}{{ m.content }}{% if m.role == "assistant" %}</s>{% else %}={% endif %}'
    '{% endfor %}'
  )


CONFIG = 'tests.runs.test_rollouts.Letters'


def share_of_a(record, answer):
  return answer.count('a') / max(len(answer), 1)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp('letters')
  tokens = ['<pad>', '<s>', '</s>', '=', *'abcdefghijkl']
  plain = dict(special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
  tokenizer = {
    'version': '1.0',
    'added_tokens': [dict(id=i, content=t, **plain) for i, t in enumerate(tokens[:3])],
    'pre_tokenizer': {
      'type': 'Split', 'pattern': {'String': ''}, 'behavior': 'Isolated', 'invert': False
    },
    'decoder': {'type': 'Fuse'},
    'model': {
      'type': 'WordLevel', 'vocab': {t: i for i, t in enumerate(tokens)}, 'unk_token': '<pad>'
    },
  }  # fmt: skip
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '</s>'}))
  lines = [json.dumps(dict(prompt=f'{c}{c}=', more=1)) for c in 'abcdefgh']
  (folder / 'prompts.jsonl').write_text('\n'.join(lines))
  lines = [json.dumps(dict(messages=[dict(role='user', content=c)])) for c in 'abcdefgh']
  (folder / 'chats.jsonl').write_text('\n'.join(lines))
  return folder


def flags(files, data='prompts'):
  return [f'--fdl.VOCAB_PATH={files}', f"--fdl.TRAIN_FILES=['{files}/{data}.jsonl']"]


def experiment(files, data='prompts', **values):
  return Letters(
    VOCAB_PATH=str(files), TRAIN_FILES=[f'{files}/{data}.jsonl'], ICI_MESH_SHAPE=[1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1], **values,
  )  # fmt: skip


def made(files, data='prompts', **values):
  """Returns an experiment, its rollouts and parameters."""
  e = experiment(files, data, **values)
  model = fdl.build(e.build_task()).model
  params = meta.unbox(jax.jit(model.init)(jax.random.key(1), np.zeros((1, 1), np.int32)))['params']
  return e, fdl.build(e.train_input()), params


def test_a_batch_follows_from_the_parameters_and_its_number(files):
  _, rollouts, params = made(files)
  rows = slice(0, 16)
  first = rollouts.next_batch(params, 3, rows)
  other = rollouts.next_batch(params, 4, rows)
  again = rollouts.next_batch(params, 3, rows)
  for name, array in first.items():
    np.testing.assert_array_equal(array, again[name], err_msg=name)
  assert (first['ids'] != other['ids']).any()
  # a group has one prompt, and its advantages add up to nothing
  prompts = first['ids'][:, :4].reshape(4, 4, 4)
  assert (prompts == prompts[:, :1]).all()
  assert len({tuple(p[0]) for p in prompts}) == 4
  tokens = first['weights'].sum(1)
  assert (tokens > 0).all()
  of_rows = first['advantages'].sum(1) / tokens
  np.testing.assert_allclose(of_rows.reshape(4, 4).sum(1), 0, atol=1e-5)
  # what the model wrote is learned, with the token that ends it
  for row in range(16):
    own = first['labels'][row][first['weights'][row] > 0]
    answer = ''.join('=abcdefghijkl'[i - 3] for i in own if i >= 3)
    assert len(own) == 6 or own[-1] == 2
    reward = first['rewards'][row].sum()
    np.testing.assert_allclose(reward, share_of_a(None, answer), atol=1e-6)


@pytest.mark.slow
def test_the_trainer_computes_the_log_probabilities_that_the_engine_drew_with(files):
  """Those of the engine come from a cache, and differ by rounding; the ratio in the loss is 1."""
  e, rollouts, params = made(files)
  task = fdl.build(e.build_task())
  rollouts._engine.params = params
  episodes = rollouts.episodes(0)
  batch = {k: jax.numpy.asarray(v) for k, v in rollouts.next_batch(params, 0, slice(0, 16)).items()}
  outputs = task._outputs(params, batch, None, {}, None)
  log_probs = np.asarray(outputs.log_probs)
  requests = [rollouts._request(ep, 0, i, 0) for i, ep in enumerate(episodes)]
  rollouts._engine.params = params
  first = [len(ep.prompt.ids) for ep in episodes]
  requests = [r.__class__(ep.prompt.ids, 6, r.sampling, r.seed, r.sample, ends=r.ends)
              for r, ep in zip(requests, episodes, strict=True)]  # fmt: skip
  for row, answer in enumerate(rollouts._engine.generate(requests)):
    drawn = [s.log_prob for s in answer.scores]
    start = first[row] - 1
    np.testing.assert_allclose(log_probs[row, start : start + len(drawn)], drawn, atol=1e-5)
  (loss, *_) = task.losses.values()
  ratios = loss._ratios(outputs.log_probs, batch)
  assert (np.asarray(ratios) == 1).all()


@pytest.mark.slow
def test_rewards_rise_and_a_killed_run_goes_on_bit_for_bit(files, tmp_path):
  runs.run(tmp_path / 'whole', *flags(files), config=CONFIG)
  whole = runs.records(tmp_path / 'whole')
  runs.run(tmp_path / 'parts', *flags(files), '--fdl.MAX_STEPS=3', config=CONFIG)
  runs.run(tmp_path / 'parts', *flags(files), config=CONFIG)
  parts = runs.records(tmp_path / 'parts')
  names = ('reward', 'answer_tokens', 'surprise')
  of = lambda records: [[r.get(n) for n in names] for r in records if 'reward' in r]
  assert of(whole) == of(parts)
  assert len(of(whole)) == 6
  longer = runs.run(
    tmp_path / 'long', *flags(files), '--fdl.MAX_STEPS=60', '--fdl.SUMMARY_INTERVAL_STEPS=20',
    config=CONFIG,
  )  # fmt: skip
  rewards = [r['reward'] for r in runs.records(tmp_path / 'long') if 'reward' in r]
  assert rewards[-1] > 0.6 > 0.3 > of(whole)[0][0], longer.stdout


@pytest.mark.slow
def test_devices_and_microbatches_change_rounding_alone(files, tmp_path):
  runs.run(tmp_path / 'one', *flags(files), config=CONFIG)
  more = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=4', '--fdl.NUM_MICROBATCHES=2']
  runs.run(tmp_path / 'four', *flags(files), *more, config=CONFIG, devices=4)
  values = lambda folder: [r['reward'] for r in runs.records(tmp_path / folder) if 'reward' in r]
  np.testing.assert_allclose(values('one'), values('four'), atol=1e-5)


@pytest.mark.slow
def test_episodes_of_several_turns(files):
  environment = f'{REWARDS}.Counting'
  _, rollouts, params = made(
    files, 'chats', ENVIRONMENT=environment, REWARDS=[], MAX_TURNS=3, MAX_NEW_TOKENS=12,
    MAX_SEQ_LEN=80,
  )  # fmt: skip
  rollouts._engine.params = params
  episodes = rollouts.episodes(0)
  decode = rollouts._encoding.tokenizer.decode_marked
  long = [ep for ep in episodes if len(ep.messages) == 5]
  assert long  # those whose answers ended by themselves
  for ep in long:
    said = [m['content'] for m in ep.messages]
    assert said[1::2] == ['again 1', 'again 2']
    own = [i for i, mine in zip(ep.ids, ep.is_own, strict=True) if mine]
    assert decode(own).count('</s>') >= 2
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  assert {float(x) for x in batch['rewards'].sum(1)} <= {2.0, 4.0, 6.0}


@pytest.mark.cases(fast=3, slow=8)
@pytest.mark.parametrize(
  ('values', 'match'),
  [
    (dict(REWARDS=[]), 'is missing: what an answer is worth'),
    (dict(REWARDS=['no path']), 'is not the dotted path of a function'),
    (dict(GROUP_SIZE=5), 'is not divisible by GROUP_SIZE=5'),
    (dict(GROUP_SIZE=1), 'GROUP_SIZE=1: an answer is compared'),
    (dict(REWARD_WEIGHTS=[1.0, 2.0]), '1 REWARDS have 2 REWARD_WEIGHTS'),
    (dict(MAX_TURNS=2), 'needs an ENVIRONMENT'),
    (dict(MAX_NEW_TOKENS=16), 'leaves no room for a prompt'),
    (dict(PACKED_INPUT=True), 'an episode is a row'),
    (dict(MAX_NEW_TOKENS=14), r'prompts\.jsonl:1.*the prompt has 4 tokens'),
    (dict(REWARDS=[f'{REWARDS}.is_nan']), r'returned nan for .*prompts\.jsonl:\d+ and the answer'),
    (dict(REWARDS=[f'{REWARDS}.raises']), 'raised ValueError: no reward for'),
    (
      dict(REWARDS=[f'{REWARDS}.hangs'], REWARD_TIMEOUT=0.5),
      r'was not done after 0\.5 seconds \(REWARD_TIMEOUT\)',
    ),
  ],
)
def test_what_cannot_be_rewarded_is_one_line(files, values, match):

  def drawn():
    experiment(files, **values).validate()
    _, rollouts, params = made(files, **values)
    rollouts.next_batch(params, 0, slice(0, 16))

  with pytest.raises(UserError, match=match):
    drawn()
