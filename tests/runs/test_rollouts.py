"""Runs that learn from rewards of their own answers."""

import errno
import functools
import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.data.base import one_segment
from paxlite.experiments.identity import write_configuration
from paxlite.experiments.llama import LLaMA
from paxlite.finetuning.reinforcement.datasets import PromptFiles
from paxlite.finetuning.reinforcement.episode import Episode
from paxlite.finetuning.reinforcement.policy_loss import OLD
from paxlite.finetuning.reinforcement.rollouts import RunFiles
from paxlite.generation.inference import load_checkpoint
from paxlite.report import tables
from paxlite.report.records import RunRecords
from paxlite.run_data import data
from tests.support import runs
from tests.support.processes import on_processes
from tests.unit.finetuning.my_rewards import share_of_a

REWARDS = 'tests.unit.finetuning.my_rewards'


class Tiny(LLaMA):
  """A tiny model with a token for each letter."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 16
  START_ID = 1
  MAX_SEQ_LEN = 16
  FPROP_DTYPE = 'float32'
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


class Letters(PromptFiles, Tiny):
  """It is rewarded for writing a."""

  MAX_NEW_TOKENS = 6
  REWARDS = ['tests.unit.finetuning.my_rewards.share_of_a']  # its processes import no JAX
  GROUP_SIZE = 4


CONFIG = 'tests.runs.test_rollouts.Letters'


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


@pytest.mark.exhaustive
@pytest.mark.slow
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


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('values', [{}, dict(ROLLOUT_TEMPERATURE=0.7), dict(NUM_MICROBATCHES=2)])
def test_the_trainer_computes_the_log_probabilities_of_the_rollout(files, values):
  """Those of a rollout are the trainer's to the last bit; the engine's come from a cache.

  With a temperature XLA fuses the division into another loop of the train step.
  """
  e, rollouts, params = made(files, UPDATES_PER_BATCH=2, **values)
  task = fdl.build(e.build_task())
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  (loss, *_) = task.losses.values()
  computed = []

  def of_loss(params, batch):
    outputs = task._outputs(params, batch, None, {}, None)
    return loss(outputs, batch), (loss._log_probs(outputs, batch), outputs.log_probs)

  size = 16 // e.NUM_MICROBATCHES
  for i in range(e.NUM_MICROBATCHES):
    part = {k: v[i * size : (i + 1) * size] for k, v in batch.items()}
    (_, found), _ = jax.jit(jax.value_and_grad(of_loss, has_aux=True))(params, part)
    computed.append(found)
  log_probs, plain = map(np.concatenate, zip(*computed, strict=True))
  own = batch['weights'] > 0
  atol = 0 if e.ROLLOUT_TEMPERATURE == 1 else 1e-6
  np.testing.assert_allclose(log_probs[own], batch['old_log_probs'][own], rtol=0, atol=atol)

  actor = rollouts._actor
  prompts = [p for p in rollouts._drawn(0, 4) for _ in range(4)]
  actor.engine.params = params
  requests = [actor.request(Episode.of(p), e.SEED << 32, i) for i, p in enumerate(prompts)]
  for row, answer in enumerate(actor.engine.generate(requests)):
    start = len(prompts[row].ids) - 1
    drawn = [s.log_prob for s in answer.scores]
    np.testing.assert_allclose(plain[row, start : start + len(drawn)], drawn, atol=1e-5)


@pytest.mark.slow
def test_packed_rollouts_teach_what_those_of_one_a_row_teach(files):
  """The same answers and old probabilities; a step computes the microbatches that hold them."""
  values = dict(UPDATES_PER_BATCH=2, NUM_MICROBATCHES=4)
  found = []
  for packed in (False, True):
    e, rollouts, params = made(files, PACKED_INPUT=packed, **values)
    batch = rollouts.next_batch(params, 0, slice(0, 16))
    if not packed:
      batch |= one_segment(batch['weights'])
    task = fdl.build(e.build_task())
    grads, _, metrics = jax.jit(lambda p, b, task=task: task.grads(p, b, None))(params, batch)
    found.append((batch, grads, metrics))
  (plain, *expected), (packed, *steps) = found
  assert packed['weights'].any(1).sum() <= 12
  own = lambda batch: np.sort(batch[OLD][batch['weights'] > 0])
  np.testing.assert_allclose(own(packed), own(plain), atol=1e-6)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, steps, expected)


@pytest.mark.slow
def test_rewards_rise_and_a_killed_run_goes_on_bit_for_bit(files, tmp_path):
  runs.run(tmp_path / 'whole', *flags(files), config=CONFIG)
  runs.run(tmp_path / 'parts', *flags(files), '--fdl.MAX_STEPS=3', config=CONFIG)
  went_on = runs.run(tmp_path / 'parts', *flags(files), '--fdl.MAX_STEPS=60', config=CONFIG)
  names = ('reward', 'answer_tokens', 'surprise')
  whole, parts = (
    [[r.get(n) for n in names] for r in runs.records(tmp_path / folder) if 'reward' in r]
    for folder in ('whole', 'parts')
  )
  assert (len(whole), len(parts)) == (6, 60)
  assert whole == parts[:6]
  assert np.mean([reward for reward, *_ in parts[-20:]]) > 0.6 > 0.3 > whole[0][0], went_on.stdout


def rewards_of(folder):
  return [r['reward'] for r in runs.records(folder) if 'reward' in r]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
  'more',
  [
    [],
    ['--fdl.DYNAMIC_SAMPLING_ROUNDS=3'],
    ['--fdl.POLICY_RATIO=sequence'],
    ['--fdl.PACKED_INPUT=True', '--fdl.NUM_MICROBATCHES=4'],
    ['--fdl.MAX_STALENESS=4', '--fdl.PARTIAL_ROLLOUTS=1'],
  ],
)
def test_a_run_killed_within_a_rollout_goes_on_bit_for_bit(files, tmp_path, more):
  several = ['--fdl.BATCHES_PER_ROLLOUT=2', '--fdl.UPDATES_PER_BATCH=2', '--fdl.MAX_STEPS=9']
  given = [*flags(files), *several, *more]
  runs.run(tmp_path / 'whole', *given, config=CONFIG)
  runs.run(tmp_path / 'parts', *given, '--fdl.MAX_STEPS=2', config=CONFIG)
  runs.run(tmp_path / 'parts', *given, '--fdl.MAX_STEPS=7', config=CONFIG)
  runs.run(tmp_path / 'parts', *given, config=CONFIG)
  names = ('reward', 'clipped', 'surprise', 'unlike_others', 'total_loss')
  of = lambda folder: [
    [r.get(n) for n in names] for r in runs.records(tmp_path / folder) if 'reward' in r
  ]
  assert of('whole') == of('parts')
  rewards = rewards_of(tmp_path / 'whole')
  # steps 1 and 3 train on the same answers, as do 2 and 4
  assert rewards[0] == rewards[2] != rewards[4]
  assert rewards[1] == rewards[3]
  # rollouts that no checkpoint needs are deleted
  found = sorted(int(p.stem) for p in (tmp_path / 'parts' / 'rollouts').glob('*.rollout'))
  assert found[-1] == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_lost_rollout_is_said_and_made_again(files, tmp_path):
  given = [*flags(files), '--fdl.UPDATES_PER_BATCH=3']
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=2', config=CONFIG)
  (tmp_path / 'run' / 'rollouts' / '0.rollout').write_bytes(b'damaged')
  went_on = runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=4', config=CONFIG)
  assert 'are not in the run folder: new ones are generated' in went_on.stdout + went_on.stderr
  assert len(rewards_of(tmp_path / 'run')) == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_other_prompts_are_noticed(files, tmp_path):
  shown = tmp_path / 'prompts.jsonl'
  lines = (files / 'prompts.jsonl').read_text()
  shown.write_text(lines)
  given = [f'--fdl.VOCAB_PATH={files}', f"--fdl.TRAIN_FILES=['{shown}']"]
  runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=1', config=CONFIG)
  shown.write_text(lines.replace('aa=', 'ab='))
  refused = runs.run(tmp_path / 'run', *given, '--fdl.MAX_STEPS=2', config=CONFIG, code=2)
  assert 'is not the data of the checkpoint of step 1' in refused.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_prompts_are_drawn_again_where_groups_are_equal(files):
  """A reward of most answers 0: groups with unequal rewards come first, and fill the batch."""
  values = dict(REWARDS=[f'{REWARDS}.begins_with_a'], GROUP_SIZE=2)
  _, once, params = made(files, **values)
  _, again, _ = made(files, DYNAMIC_SAMPLING_ROUNDS=20, **values)
  rows = slice(0, 16)
  unequal = lambda batch: np.ptp(batch['rewards'].sum(1).reshape(8, 2), axis=1) > 0
  assert 0 < unequal(once.next_batch(params, 0, rows)).sum() < 8
  assert unequal(again.next_batch(params, 0, rows)).all()
  # what comes next depends on how many prompts were drawn, which a checkpoint holds
  state = again.state()
  assert state['position'] > 8
  expected = again.next_batch(params, 1, rows)
  again.restore(state)
  found = again.next_batch(params, 1, rows)
  for name, array in expected.items():
    np.testing.assert_array_equal(array, found[name], err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_devices_and_microbatches_change_rounding_alone(files, tmp_path):
  runs.run(tmp_path / 'one', *flags(files), config=CONFIG)
  more = ['--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.PERCORE_BATCH_SIZE=4', '--fdl.NUM_MICROBATCHES=4']
  more += ['--fdl.PACKED_INPUT=True']
  runs.run(tmp_path / 'four', *flags(files), *more, config=CONFIG, devices=4)
  np.testing.assert_allclose(rewards_of(tmp_path / 'one'), rewards_of(tmp_path / 'four'), atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ('turns', 'more'),
  [(2, []), (1, []), (2, ['PARTIAL_ROLLOUTS=1']), (1, ['MAX_STALENESS=2', 'PACKED_INPUT=True'])],
)
def test_processes_generate_and_reward_together(files, tmp_path, turns, more):
  """Two processes of two devices each train on the same answers as one, also within a rollout."""
  given = [*flags(files, 'prompts' if turns == 1 else 'chats'), '--fdl.PERCORE_BATCH_SIZE=4']
  given += ['--fdl.UPDATES_PER_BATCH=2', *(f'--fdl.{value}' for value in more)]
  if turns > 1:
    given += [f'--fdl.ENVIRONMENT={REWARDS}.Counting', f'--fdl.MAX_TURNS={turns}']
    given += ['--fdl.MAX_SEQ_LEN=40']
  runs.run(tmp_path / 'one', *given, '--fdl.ICI_MESH_SHAPE=[2,2,1]', config=CONFIG, devices=4)
  on_processes(tmp_path / 'two', 2, *given, '--fdl.MAX_STEPS=3', config=CONFIG)
  on_processes(tmp_path / 'two', 2, *given, config=CONFIG)  # goes on within a rollout
  one, two = (rewards_of(tmp_path / name) for name in ('one', 'two'))
  assert len(one) == len(two) == 6
  np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.exhaustive
def test_a_task_is_evaluated_while_training(files, tmp_path):
  """The answers of held-out prompts are those that the checkpoint of the step gives."""
  lines = [json.dumps(dict(prompt=f'{c}{c}=', completion='aaaaaa')) for c in 'abcdefgh']
  (tmp_path / 'held_out.jsonl').write_text('\n'.join(lines))
  (tmp_path / 'a.json').write_text(json.dumps(dict(
    kind='generate', files='held_out.jsonl', doc_to_text='{{prompt}}', generation_pattern='^a',
    doc_to_target='{{completion}}', target_pattern='^a', max_new_tokens=6,
  )))  # fmt: skip
  tasks = f"--fdl.EVAL_TASKS=['{tmp_path}/a.json']"
  given = [*flags(files), tasks, '--fdl.EVAL_INTERVAL_STEPS=3']
  trained = runs.run(tmp_path / 'run', *given, '--fdl.EVAL_TASKS_IN_TRAINING=True', config=CONFIG)
  found = {
    r['step']: r['exact_match']
    for r in runs.records(tmp_path / 'run', 'eval_metrics.jsonl')
    if r['input'] == 'a'
  }
  assert found.keys() == {3, 6}
  assert 'eval a at step 6: exact_match' in trained.stdout
  loaded = load_checkpoint(str(tmp_path / 'run'), overrides={'MAX_SEQ_LEN': '6'})
  assert len(loaded.engine().continuations([[1, 5]], 3)[0]) <= 3
  evaluated = runs.run(tmp_path / 'run', *given, '--mode=eval', config=CONFIG)
  assert f'eval a at step 6: exact_match {found[6]:.4f}' in evaluated.stdout
  refused = runs.run(tmp_path / 'none', *flags(files), '--fdl.EVAL_TASKS_IN_TRAINING=True',
                     config=CONFIG, code=2)  # fmt: skip
  assert 'needs EVAL_TASKS' in refused.stderr


@pytest.mark.slow
def test_episodes_of_several_turns(files):
  environment = f'{REWARDS}.Counting'
  _, rollouts, params = made(
    files, 'chats', ENVIRONMENT=environment, REWARDS=[], MAX_TURNS=3, MAX_NEW_TOKENS=12,
    MAX_SEQ_LEN=80,
  )  # fmt: skip
  prompts = [p for p in rollouts._drawn(0, 4) for _ in range(4)]
  episodes = rollouts._actor.play(params, prompts, rollouts._judges, 0)
  decode = rollouts._actor.engine.tokenizer.decode_marked
  long = [ep for ep in episodes if len(ep.messages) == 5]
  assert long  # those whose answers ended by themselves
  for ep in long:
    said = [m['content'] for m in ep.messages]
    assert said[1::2] == ['again 1', 'again 2']
    own = [i for i, mine in zip(ep.ids, ep.is_own, strict=True) if mine]
    assert decode(own).count('</s>') >= 2
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  assert {float(x) for x in batch['rewards'].sum(1)} <= {2.0, 4.0, 6.0}


@pytest.mark.slow
def test_an_environment_fails_in_some_episodes(files):
  """They have the advantage 0; the others learn from rewards of turns, and not from replies."""
  _, rollouts, params = made(
    files, 'chats', ENVIRONMENT=f'{REWARDS}.Pairs', REWARDS=[], MAX_TURNS=2, MAX_NEW_TOKENS=12,
    MAX_SEQ_LEN=60, PERCORE_BATCH_SIZE=32,
  )  # fmt: skip
  episodes, rewards_GN = rollouts._played(params, 0)
  values = rollouts._made(params, 0)['advantages']
  failed = np.array([e.prompt.record['messages'][0]['content'] in 'cd' for e in episodes])
  assert [bool(e.error) for e in episodes] == failed.tolist()
  assert 8 <= failed.sum() < 32
  assert (values[failed] == 0).all()
  assert (values[~failed] != 0).any()
  decode = rollouts._actor.engine.tokenizer.decode_marked
  long = [e for e in episodes if len(e.messages) == 4]
  assert long
  for e in long:
    foreign = [i for i, mine in zip(e.ids, e.is_own, strict=True) if not mine]
    assert decode(foreign) == f'{decode(e.prompt.ids)}ab=c='
  for e, reward in zip(episodes, rewards_GN.reshape(-1), strict=True):
    said = sum(len(m['content']) for m in e.messages if m['role'] == 'assistant')
    assert e.error or reward == 0.5 * said


@pytest.mark.slow
def test_a_prompt_shows_the_tools_and_an_answer_calls_them(files):
  template = '{% for t in tools %}{{ t.function.name }}{% endfor %}' + Letters.CHAT_TEMPLATE
  values = dict(MAX_TURNS=2, MAX_SEQ_LEN=60, CHAT_TEMPLATE=template, TOOLS=[f'{REWARDS}.add'])
  _, rollouts, _ = made(files, 'chats', **values)
  (prompt,) = rollouts._drawn(0, 1)
  assert prompt.tools[0]['function']['name'] == 'add'
  actor = rollouts._actor
  decode = actor.engine.tokenizer.decode_marked
  assert decode(prompt.ids).endswith(f'add{prompt.record["messages"][0]["content"]}=')
  episode = Episode.of(prompt)
  said = '<tool_call>{"name": "add", "arguments": {"a": 100}}</tool_call>'
  episode.append([4, 2], True, {'role': 'assistant', 'content': said})
  actor._replied([episode], rollouts._judges, 0.0)
  assert episode.messages[1]['content'] == 'error: ValueError: too large'
  assert episode.is_own[-3:] == [False] * 3
  assert decode(episode.ids[-1:]) == '='
  with pytest.raises(
    UserError, match='system messages and tools need messages: write "prompt" as messages'
  ):
    made(files, 'prompts', **values)


@pytest.mark.slow
def test_episodes_can_be_read_and_a_full_disk_loses_none(
  files, tmp_path, monkeypatch, caplog, capsys
):
  e, rollouts, params = made(files, UPDATES_PER_BATCH=2, KEPT_EPISODES=5)
  rollouts.run_files = RunFiles(tmp_path / 'rollouts', True, lambda: 0)
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  kept = runs.records(tmp_path, 'episodes.jsonl')
  assert [(r['row'], r['batches']) for r in kept] == [(row, [0, 1]) for row in range(5)]
  for row, episode in enumerate(kept):
    (answer,) = episode['answer']
    found = share_of_a(None, answer['content'])
    assert list(episode['rewards']) == e.REWARDS
    np.testing.assert_allclose([*episode['rewards'].values(), episode['reward']], found, rtol=1e-6)
    assert episode['reward'] == batch['rewards'][row].sum()
    assert episode['advantage'] in batch['advantages'][row]
    assert episode['prompt'][:2] in [2 * c for c in 'abcdefgh']

  def full(path, *args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device', str(path))

  with monkeypatch.context() as patch:
    patch.setattr('paxlite.core.run_files.open_file', full)
    patch.setattr('paxlite.tracking.writers.open_file', full)
    for number in (2, 3, 4):
      rollouts.next_batch(params, number, slice(0, 16))
  said = [r.getMessage() for r in caplog.records]
  assert len(said) == 1
  assert 'rollouts cannot be written, training continues: No space left on device' in said[0]
  rollouts.next_batch(params, 6, slice(0, 16))
  kept = runs.records(tmp_path, 'episodes.jsonl')
  assert [r['batches'] for r in kept] == [[n, n + 1] for n in (0, 2, 4, 6) for _ in range(5)]

  write_configuration(e, tmp_path)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 6, "loss": 1.0}\n')
  data.main([str(tmp_path), '--step=6', '--row=3'])  # the second update with batch 4
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'Step 6: 5 of its episodes are kept (KEPT_EPISODES)'
  shown = kept[13]
  assert f'Row 3  reward {shown["reward"]:.4g} ({e.REWARDS[0]} ' in lines[2]
  assert lines[3:] == [
    f'    prompt: {shown["prompt"]}',
    f'    assistant: {shown["answer"][0]["content"]}',
  ]
  with pytest.raises(UserError, match='--row=9: the rows from 0 to 4 are kept'):
    data.main([str(tmp_path), '--step=6', '--row=9'])
  _, rows = tables.episodes([RunRecords(tmp_path, 'letters')])
  assert len(rows) == 20
  assert rows[-1][1] == '7'


@pytest.mark.cases(fast=3, slow=1)
@pytest.mark.parametrize(
  ('values', 'match'),
  [
    (dict(REWARDS=[]), 'is missing: set a reward'),
    (dict(REWARDS=['no path']), 'is not the dotted path of a function'),
    (dict(GROUP_SIZE=5), 'is not divisible by GROUP_SIZE=5'),
    (dict(GROUP_SIZE=1), 'GROUP_SIZE=1: an answer is compared'),
    (dict(REWARD_WEIGHTS=[1.0, 2.0]), '1 REWARDS have 2 REWARD_WEIGHTS'),
    (dict(CLIP_HIGH=0.28), 'CLIP_HIGH=0.28 has no effect while the ratio of probabilities is 1'),
    (dict(USE_INT8='forward', UPDATES_PER_BATCH=2), 'USE_INT8=forward: with several updates'),
    (dict(CLIP_LOW=1.0, UPDATES_PER_BATCH=2), 'CLIP_LOW=1: a ratio'),
    (dict(MAX_STALENESS=3, UPDATES_PER_BATCH=2), 'MAX_STALENESS=3 is not divisible by the 2'),
    (dict(MAX_STALENESS=1, DYNAMIC_SAMPLING_ROUNDS=2), 'needs the rewards of a rollout at once'),
    (dict(MAX_IMPORTANCE=3.0), 'MAX_IMPORTANCE=3 has no effect: set MAX_STALENESS or PARTIAL_R'),
    (dict(USE_INT8='forward', PARTIAL_ROLLOUTS=1), 'USE_INT8=forward: with several updates'),
    (dict(MAX_TURNS=2), 'needs an ENVIRONMENT'),
    (dict(TOOLS=[f'{REWARDS}.add']), 'MAX_TURNS=1: TOOLS need another answer'),
    (dict(MAX_NEW_TOKENS=16), 'leaves no room for a prompt'),
    (dict(MAX_NEW_TOKENS=14), r'prompts\.jsonl:1.*the prompt has 4 tokens'),
    (
      dict(REWARDS=[f'{REWARDS}.is_nan']),
      r"returned nan for .*\.jsonl:\d+ \('..='\) and the answer",
    ),
    (
      dict(REWARDS=[f'{REWARDS}.raises']),
      r'raises for \S+prompts\.jsonl:\d+ \(\'..=\'\) raised ValueError: no reward for',
    ),
    (
      dict(REWARDS=[f'{REWARDS}.hangs'], REWARD_TIMEOUT=0.5),
      r'did not finish within 0\.5 seconds \(REWARD_TIMEOUT\)',
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
