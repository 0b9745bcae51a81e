"""Distillation on the student's own answers: its batches, its teachers, and after a stop."""

import functools
import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.data.base import one_segment
from paxlite.experiments.datasets import SftFiles
from paxlite.experiments.finetuning import HuggingFaceOnPolicyDistillation
from paxlite.experiments.identity import write_configuration
from paxlite.finetuning.distillation.on_policy import OnPolicyDistillation
from paxlite.finetuning.reinforcement.rollouts import RunFiles
from paxlite.programs.run import Run
from paxlite.programs.weights_model import knowing_weights
from paxlite.run_data.episodes import worth
from tests.runs import test_rollouts
from tests.runs.test_rollouts import Tiny
from tests.support import runs

files = test_rollouts.files
LETTERS = 'abcdefgh'
AFTER = {c: 2 * chr(ord(c) + 1) for c in LETTERS}  # what the teacher answers


class Teacher(SftFiles, Tiny):
  """Another depth and width than the student's."""

  NUM_LAYERS, MODEL_DIMS = 3, 48
  PACKED_INPUT, MAX_STEPS, SUMMARY_INTERVAL_STEPS = False, 60, 20


class Student(OnPolicyDistillation, Tiny):
  MAX_NEW_TOKENS = 6


ONE = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1])
NAMES = 'loss', 'grad_norm', 'teacher_agreement', 'answer_tokens'


@pytest.fixture(scope='module')
def teacher(files):
  """A run that has learned to name the next letter twice; the prompts have its answers."""
  lines = [
    dict(prompt=f'{c}{c}=', completion=AFTER[c], teacher_prompt=f'{c}l{c}=') for c in LETTERS
  ]
  (files / 'answers.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  values = dict(VOCAB_PATH=str(files), TRAIN_FILES=[f'{files}/answers.jsonl'], **ONE)
  trained(Teacher(**values), files / 'teacher')
  return files / 'teacher'


def trained(e, folder):
  folder.mkdir(exist_ok=True)
  write_configuration(e, folder)
  t = Run(e, folder).trainer()
  t.train(*t.store.initial())


def flags(files, teacher, *more):
  return [
    f'--fdl.VOCAB_PATH={files}', f"--fdl.TRAIN_FILES=['{files}/answers.jsonl']",
    f'--fdl.TEACHER={teacher}', *more,
  ]  # fmt: skip


def of(folder):
  return [[r.get(n) for n in NAMES] for r in runs.records(folder) if 'answer_tokens' in r]


run = functools.partial(runs.run, config='tests.runs.test_on_policy.Student')


@pytest.mark.slow
def test_a_student_learns_from_its_answers_and_a_killed_run_goes_on_bit_for_bit(
  files, teacher, tmp_path
):
  given = flags(files, teacher, '--fdl.UPDATES_PER_BATCH=2', '--fdl.STUDENT_SHARE=0.75')
  run(tmp_path / 'whole', *given)
  for steps in (3, 6):  # the first ends within a rollout
    run(tmp_path / 'parts', *given, f'--fdl.MAX_STEPS={steps}')
  whole = of(tmp_path / 'whole')
  assert whole == of(tmp_path / 'parts')
  assert len(whole) == 6
  episodes = lambda name: runs.records(tmp_path / name, 'episodes.jsonl')
  assert episodes('whole') == episodes('parts')
  assert whole[-1][0] < 0.8 * whole[0][0]
  assert whole[-1][2] > 0.3 > whole[0][2]


@pytest.mark.slow
def test_generation_ahead_of_training_changes_no_bit_on_a_device_of_its_own(
  files, teacher, tmp_path
):
  """Also where a run goes on with answers of weights that are not there any more."""
  given = flags(files, teacher, '--fdl.MAX_STALENESS=2', '--fdl.STUDENT_SHARE=0.75')
  run(tmp_path / 'one', *given)
  for steps in (3, 6):
    beside = ['--fdl.ROLLOUT_DEVICES=1', f'--fdl.MAX_STEPS={steps}']
    run(tmp_path / 'two', *given, *beside, devices=2)
  assert of(tmp_path / 'one') == of(tmp_path / 'two')
  episodes = lambda name: runs.records(tmp_path / name, 'episodes.jsonl')
  assert episodes('one') == episodes('two')


def made(files, **values):
  """Returns rollouts of a LoRA student whose base is the teacher, their parameters and the task."""
  folder = files / 'hints.jsonl'
  lines = [
    dict(prompt=f'{c}{c}=', completion=AFTER[c], teacher_prompt=f'{c}l{c}=') for c in LETTERS
  ]
  folder.write_text('\n'.join(map(json.dumps, lines)))
  values = ONE | dict(USE_LORA=True) | values
  e = Student(VOCAB_PATH=str(files), TRAIN_FILES=[str(folder)], **values)
  e.validate()
  task = fdl.build(e.build_task())
  init = jax.jit(task.model.init)(jax.random.key(1), np.zeros((1, 1), np.int32))
  return fdl.build(e.train_input()), meta.unbox(init)['params'], task


def divergences(task, params, batch):
  of = lambda p, b: task.losses['divergence'](task._outputs(p, b, None, {}, None), b)
  return jax.jit(of)(params, batch)


@pytest.mark.slow
def test_a_base_with_a_hint_teaches_its_factors_token_by_token(files):
  """Factors begin at nothing, so that only the hint tells the teacher from the student."""
  rollouts, params, task = made(files, TEACHER_PROMPTS=True)
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  model = task.reference.model
  apply = jax.jit(lambda ids: model.apply({'params': params}, ids))

  def logits_of(ids):  # one program for all lengths
    return np.asarray(apply(np.pad(ids, (0, 16 - len(ids)))[None]), np.float64)[0, : len(ids)]

  log_softmax = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
  expected = 0.0
  for i in range(16):
    own = np.flatnonzero(batch['weights'][i])
    answer = batch['labels'][i][own]
    first = int(own[0]) + 1
    letter = batch['ids'][i][1]
    assert batch['ids'][i][:first].tolist() == [1, letter, letter, 3]
    hinted = np.array([1, letter, 15, letter, 3, *answer], np.int32)
    q = log_softmax(logits_of(np.array([*batch['ids'][i][:first], *answer], np.int32)))[first - 1 :]
    p = log_softmax(logits_of(hinted))[first:]
    expected += sum((np.exp(b) * (b - a)).sum() for a, b in zip(p, q, strict=True) if len(a))
    expected -= (np.exp(q[-1]) * (q[-1] - p[-1])).sum()  # what follows the last token
  np.testing.assert_allclose(divergences(task, params, batch), expected, rtol=1e-5)
  assert expected > 1e-3

  plain, params, task = made(files)
  same = plain.next_batch(params, 0, slice(0, 16))
  np.testing.assert_array_equal(same['ids'], batch['ids'])
  assert abs(float(divergences(task, params, same))) < 1e-5


@pytest.mark.slow
def test_given_answers_are_mixed_with_those_of_the_student(files, tmp_path):
  rollouts, params, _ = made(files, STUDENT_SHARE=0.5, KEPT_EPISODES=16, TEACHER_PROMPTS=True)
  rollouts.run_files = RunFiles(tmp_path / 'rollouts', True, lambda: 0)
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  for name, array in rollouts.next_batch(params, 0, slice(0, 16)).items():
    np.testing.assert_array_equal(array, batch[name], err_msg=name)
  kept = runs.records(tmp_path, 'episodes.jsonl')[:16]
  given = [row for row, record in enumerate(kept) if record['is_given']]
  assert 3 < len(given) < 13
  for row in given:
    answer = AFTER[kept[row]['prompt'][0]]
    assert kept[row]['answer'][0]['content'] == answer
    own = batch['labels'][row][batch['weights'][row] > 0]
    assert ''.join('=abcdefghijkl'[i - 3] for i in own if i >= 3) == answer
    assert own[-1] == 2
  assert {worth(record) for record in kept} == {'a given answer', "the student's answer"}
  all_given, params, _ = made(files, STUDENT_SHARE=0.0)
  batch = all_given.next_batch(params, 0, slice(0, 16))
  assert (batch['weights'].sum(1) == 3).all()


@pytest.mark.slow
def test_packed_answers_teach_what_those_of_one_a_row_teach(files):
  """Also where the teacher reads a hint, which makes its text longer or shorter."""
  values = dict(TEACHER_PROMPTS=True, STUDENT_SHARE=0.5, NUM_MICROBATCHES=4)
  found = []
  for packed in (False, True):
    rollouts, params, task = made(files, PACKED_INPUT=packed, **values)
    batch = rollouts.next_batch(params, 0, slice(0, 16))
    batch = one_segment(batch['weights']) | batch
    grads, _, metrics = jax.jit(lambda p, b, task=task: task.grads(p, b, None))(params, batch)
    # a longer hint counts as tokens of its answer
    found.append((grads, {name: m.value for name, m in metrics.items()}))
    assert (batch['weights'].any(1).sum() < 16) == packed
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, *found)
  assert max(float(abs(x).max()) for x in jax.tree.leaves(found[0][0])) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
  'values', [{}, dict(SAMPLED_DIVERGENCE='k2', ESTIMATE_GRADIENT='direct')], ids=['whole', 'drawn']
)
def test_microbatches_with_few_tokens_do_not_count_more(files, values):
  """github.com/huggingface/trl/pull/6006: GKD's loss depended on how a batch was split."""
  rollouts, params, whole = made(files, TEACHER_PROMPTS=True, **values)
  batch = dict(rollouts.next_batch(params, 0, slice(0, 16)))
  batch = one_segment(batch['weights']) | batch
  batch['weights'] = batch['weights'] * (np.arange(16)[:, None] % 4 == 0)
  _, _, parts = made(files, TEACHER_PROMPTS=True, NUM_MICROBATCHES=4, **values)
  (expected, _, one), (found, _, four) = (
    jax.jit(lambda p, b, task=task: task.grads(p, b, None))(params, batch)
    for task in (whole, parts)
  )
  np.testing.assert_allclose(four['divergence'].value, one['divergence'].value, rtol=1e-5)
  assert one['divergence'].value > 1e-3
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), found, expected)


def of_two_teachers(files, teacher, other, **values):
  """Returns rollouts with the teachers x and y, of whose prompts every second one is y's."""
  lines = [
    dict(prompt=f'{c}{c}=', task='xy'[i % 2], teacher_prompt=f'{c}l{c}=')
    for i, c in enumerate(LETTERS)
  ]
  (files / 'two.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  names = [f'x={teacher}', f'y={other}']
  values = dict(TRAIN_FILES=[f'{files}/two.jsonl'], TEACHERS=names) | values
  e = knowing_weights(Student(VOCAB_PATH=str(files), **values, **ONE))
  e.validate()
  task = fdl.build(e.build_task())
  init = jax.jit(task.model.init)(jax.random.key(1), np.zeros((1, 1), np.int32))
  return fdl.build(e.train_input()), meta.unbox(init)['params'], task


@pytest.fixture(scope='module')
def other(files, teacher):
  """A teacher of another depth, which has learned nothing."""
  values = dict(VOCAB_PATH=str(files), TRAIN_FILES=[f'{files}/answers.jsonl'], **ONE)
  trained(Teacher(**values, NUM_LAYERS=1, MAX_STEPS=1, SEED=7), files / 'other')
  return files / 'other'


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('values', [
  dict(TEACHER_TOP_K=16, TEACHER_PROMPTS=True, STUDENT_SHARE=1.0),
  dict(SAMPLED_DIVERGENCE='k3', ESTIMATE_GRADIENT='direct'), dict(TEACHER_TOP_K=16),
])  # fmt: skip
def test_each_record_has_the_teacher_that_it_names(files, teacher, other, values):
  """The loss of two teachers is the sum of those of one each, for the rows of its records."""
  rollouts, params, task = of_two_teachers(files, teacher, other, **values)
  batch = rollouts.next_batch(params, 0, slice(0, 16))
  assert {len(x) for x in batch.values()} == {16}
  found = divergences(task, params, batch)
  is_y = np.array([LETTERS.index('=abcdefgh'[i - 3]) % 2 for i in batch['ids'][:, 1]], bool)
  assert 0 < is_y.sum() < 16
  parts = []
  for folder, rows in ((teacher, ~is_y), (other, is_y)):
    alone, _, its_task = of_two_teachers(files, teacher, other, **values, TEACHERS=[f'x={folder}',
                                         f'y={folder}'])  # fmt: skip
    its = alone.next_batch(params, 0, slice(0, 16))
    np.testing.assert_array_equal(its['ids'], batch['ids'])
    parts.append(divergences(its_task, params, {k: x[rows] for k, x in its.items()}))
  np.testing.assert_allclose(found, sum(parts), rtol=1e-5)
  assert abs(parts[0] - parts[1]) > 0.1
  # a step that computes the one teacher finds the same
  values = {**values, 'TEACHER_TOP_K': 0} if 'TEACHER_TOP_K' in values else values
  one, _, task = of_two_teachers(files, teacher, other, **values, TEACHERS=[], TEACHER=str(teacher))
  its = one.next_batch(params, 0, slice(0, 16))
  model = task.reference.model
  loaded = alone_params(rollouts)
  assert jax.tree.structure(loaded) == jax.tree.structure(
    meta.unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32)))['params']
  )
  rows = {k: x[~is_y] for k, x in its.items()}
  with_teacher = {**params, 'reference': loaded}
  np.testing.assert_allclose(divergences(task, with_teacher, rows), parts[0], rtol=1e-5)


def alone_params(rollouts):
  return rollouts._teachers._params[0]


@pytest.mark.slow
def test_a_run_of_several_teachers_goes_on_and_notices_other_weights(
  files, teacher, other, tmp_path
):
  of_two_teachers(files, teacher, other, TEACHER_TOP_K=4)  # writes the prompts
  given = [
    f'--fdl.VOCAB_PATH={files}', f"--fdl.TRAIN_FILES=['{files}/two.jsonl']",
    f"--fdl.TEACHERS=['x={teacher}','y={other}']", '--fdl.TEACHER_TOP_K=4',
    '--fdl.UPDATES_PER_BATCH=2',
  ]  # fmt: skip
  run(tmp_path / 'whole', *given)
  run(tmp_path / 'parts', *given, '--fdl.MAX_STEPS=3')
  run(tmp_path / 'parts', *given)
  assert of(tmp_path / 'whole') == of(tmp_path / 'parts')
  assert len(of(tmp_path / 'whole')) == 6
  given[2] = f"--fdl.TEACHERS=['x={other}','y={other}']"
  refused = run(tmp_path / 'parts', *given, '--fdl.MAX_STEPS=8', code=2)
  assert 'TEACHERS: the weights of x are not those that the run began with' in refused.stderr


def test_a_hint_may_be_messages(files, tmp_path):
  user = lambda text: dict(role='user', content=text)
  system = dict(role='system', content='b')
  lines = [
    dict(messages=[user('a')], teacher_prompt=[system, user('a')]),
    dict(prompt='aa=', teacher_prompt=[user('c'), dict(role='assistant', content='d'), user('a')]),
    dict(messages=[user('a')], teacher_prompt='bb='),
  ]
  (tmp_path / 'hints.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  values = dict(TRAIN_FILES=[f'{tmp_path}/hints.jsonl'], USE_LORA=True, TEACHER_PROMPTS=True)
  prompts = fdl.build(Student(VOCAB_PATH=str(files), **values, **ONE).prompts)
  text = prompts.reader.encoding.tokenizer.decode_marked
  found = [text(prompts.reader.hinted(prompts[i].record)) for i in range(3)]
  assert found == ['b=a=', 'c=d</s>a=', '<s>bb=']


def test_what_cannot_be_taught_is_one_line(files, tmp_path):
  lines = files / 'chats.jsonl'
  plain = dict(VOCAB_PATH=str(files), TRAIN_FILES=[str(lines)], USE_LORA=True, **ONE)
  for values, message in (
    (dict(STUDENT_SHARE=0.5), r'chats\.jsonl:1.*has no answer'),
    (dict(TEACHER_PROMPTS=True), r"chats\.jsonl:1.*it has no 'teacher_prompt'"),
  ):
    with pytest.raises(UserError, match=message):
      fdl.build(Student(**plain, **values).train_input())
  for values, message in (
    (dict(DIVERGENCE_BETA=0.1), 'DIVERGENCE_BETA=0.1 has no effect with DIVERGENCE=reverse'),
    (dict(DIVERGENCE='jensen_shannon', DIVERGENCE_BETA=1.0), 'is the limit DIVERGENCE=reverse'),
    (dict(TEACHERS=['x']), "'x' is not NAME=FOLDER"),
    (dict(TEACHERS=['x=a', 'x=b']), 'has a name twice'),
    (dict(TEACHERS=['x=a'], TEACHER='b', TEACHER_TOP_K=2), 'TEACHER and TEACHERS are both set'),
    (dict(TEACHERS=['x=a']), 'set TEACHER_TOP_K=64 or SAMPLED_DIVERGENCE'),
    (dict(SAMPLED_DIVERGENCE='k1', TEACHER_TOP_K=2), 'TEACHER_TOP_K=2: .*: TEACHER_TOP_K=0'),
    (dict(SAMPLED_DIVERGENCE='k1', STUDENT_SHARE=0.5), 'STUDENT_SHARE=1.0'),
    (dict(SAMPLED_DIVERGENCE='k1', UPDATES_PER_BATCH=2), 'UPDATES_PER_BATCH=1'),
    (dict(SAMPLED_DIVERGENCE='k1', ESTIMATE_GRADIENT='direct'), 'the mean of its direct gradient'),
    (dict(ESTIMATE_GRADIENT='direct'), 'has no effect without SAMPLED_DIVERGENCE'),
  ):
    with pytest.raises(UserError, match=message):
      Student(**plain, **values).validate()
  with pytest.raises(UserError, match='TEACHER=FOLDER is missing'):
    HuggingFaceOnPolicyDistillation(MODEL='LLaMA3_8B', CHECKPOINT_RESTORE_PATH='a').train_input()


@pytest.mark.slow
def test_a_teacher_of_other_tokens_is_refused_by_name(files, teacher, tmp_path):
  other = tmp_path / 'tokens'
  other.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (other / name).write_text((files / name).read_text().replace('"a"', '"z"'))
  of_two_teachers(files, teacher, teacher, TEACHER_TOP_K=2)  # writes the prompts
  several = dict(TEACHERS=[f'x={teacher}', f'y={teacher}'], TEACHER_TOP_K=2)
  for more in (dict(TEACHER=str(teacher)), several):
    values = dict(VOCAB_PATH=str(other), TRAIN_FILES=[f'{files}/two.jsonl'])
    e = knowing_weights(Student(**values, **more, **ONE))
    with pytest.raises(UserError, match='teacher has another tokenizer than the run') as raised:
      Run(e, tmp_path).trainer()
    assert '\n' not in str(raised.value)
  (files / 'nameless.jsonl').write_text('{"prompt": "aa=", "task": "x"}\n{"prompt": "bb="}')
  with pytest.raises(
    UserError, match=r"nameless\.jsonl:2.*its 'task' is None and names no teacher"
  ):
    of_two_teachers(
      files, teacher, teacher, TEACHER_TOP_K=2, TRAIN_FILES=[f'{files}/nameless.jsonl']
    )
  with pytest.raises(UserError, match='nowhere'):
    of_two_teachers(files, teacher, files / 'nowhere', TEACHER_TOP_K=2)
