"""Log-likelihoods equal those of separate computation; each continuation is counted once."""

import dataclasses
import functools
import json
import math
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import paxlite
from paxlite.core.errors import UserError
from paxlite.eval import scoring
from paxlite.eval.commands import zero_shot as tool
from paxlite.eval.eval_tasks import find_tasks, read_examples, read_tasks
from paxlite.eval.scoring import Continuation, Scorer, bucket
from paxlite.eval.zero_shot import Metric, Result, compared_text, contexts_of, matched
from paxlite.generation.engine import Engine
from paxlite.generation.request import Completion
from paxlite.generation.spelling import Mark, shown
from tests.support import runs
from tests.unit.generation.test_decoding import CONFIG
from tests.unit.generation.test_engine import made


def test_the_table_of_a_task():
  result = Result({'acc': Metric(0.5, 0.25)}, [{'truncated': True}] * 3000, 1.5, unreadable=2)
  assert result.table('lambada').splitlines() == [
    'lambada: 3,000 examples, 2,000.0 a second',
    '  acc                       0.5000 ± 0.2500',
    "  3,000 prompts longer than the model's context, cut at the beginning",
    '  2 unreadable records left out',
  ]


def some(count: int, seed: int = 0) -> list[Continuation]:
  """Returns continuations of many lengths; every third one has its neighbor's context."""
  rng = np.random.default_rng(seed)
  found: list[Continuation] = []
  for i in range(count):
    context = found[-1].context if i % 3 == 2 else rng.integers(0, 97, rng.integers(1, 60)).tolist()
    found.append(Continuation(context, rng.integers(0, 97, 1 + i % 2 * 3).tolist()))
  return found


@functools.cache
def logits_of(name: str):
  """Returns a function from ids [64] to logits [64, V], compiled once."""
  model, params = made(name)
  program = jax.jit(lambda ids: model.apply({'params': params}, ids[None])[0])
  return lambda ids: np.asarray(program(ids), np.float64)


def alone(name: str, c: Continuation, max_len: int = 64) -> tuple[float, bool]:
  """Returns the sum of log-likelihoods, and whether greedy decoding gives the continuation.

  The continuation is alone in a row of `max_len`; everything after the logits is in float64. No
  input sees the padding behind it.
  """
  ids = [*c.context, *c.continuation]
  inputs, n = ids[:-1][-max_len:], len(c.continuation)
  row = np.zeros(max_len, np.int32)
  row[: len(inputs)] = inputs
  logits = logits_of(name)(row)[len(inputs) - n : len(inputs)]
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  targets = np.array(c.continuation)
  return log_p[np.arange(n), targets].sum(), bool((log_p.argmax(-1) == targets).all())


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'gpt', 'window'])
@pytest.mark.parametrize(('count', 'batch_tokens'), [(1, 64), (37, 64), (50, 1000)])
def test_scores_in_batches_are_those_alone(name, count, batch_tokens):
  model, params = made(name)
  asked = some(count)
  # Also the most likely token, so that some continuations are greedy.
  logits = model.apply({'params': params}, np.array([asked[0].context]))
  asked.append(Continuation(asked[0].context, [int(logits[0, -1].argmax())]))
  scores = Scorer(model, params, 64, batch_tokens)(asked)
  assert len(scores) == len(asked)
  for c, score in zip(asked, scores, strict=True):
    log_likelihood, is_greedy = alone(name, c)
    assert abs(score.log_likelihood - log_likelihood) < 2e-5 * max(1, abs(log_likelihood))
    assert score.is_greedy == is_greedy
  assert scores[-1].is_greedy


@pytest.mark.slow
def test_a_long_context_loses_its_beginning():
  model, params = made('llama')
  c = Continuation(list(range(90)), [3, 4])
  (score,) = Scorer(model, params, 64)([c])
  assert math.isclose(score.log_likelihood, alone('llama', c)[0], rel_tol=1e-5)
  (cut,) = Scorer(model, params, 64)([Continuation(list(range(27, 90)), [3, 4])])
  assert dataclasses.replace(cut, is_truncated=True) == score
  assert not cut.is_truncated
  with pytest.raises(UserError, match='a continuation of 65 tokens is longer than the model'):
    Scorer(model, params, 64)([Continuation([1], [2] * 65)])


@pytest.mark.slow
def test_alternatives_of_one_context_share_a_row():
  model, params = made('llama')
  scorer = Scorer(model, params, 64)
  rows = []
  scorer([Continuation([1, 2, 3], [i]) for i in range(5)], lambda done, total: rows.append(total))
  assert rows == [1]


def test_buckets_pad_a_third_at_most():
  sizes = sorted({bucket(n) for n in range(1, 2000)})
  assert sizes[:6] == [32, 48, 64, 96, 128, 192]
  assert all(bucket(n) * 2 / 3 < n <= bucket(n) for n in range(32, 2000))


def write(path, records) -> str:
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


def task(tmp_path, **changes) -> str:
  path = tmp_path / 'task.json'
  path.write_text(json.dumps(changes))
  return str(path)


def test_tasks_by_naming_fields(tmp_path):
  """The records of well-known datasets have different forms."""
  piqa = dict(goal='Boil water', sol1='use a pot', sol2='use a hat', label=0)
  arc = dict(question='What is hot?', answerKey='C',
             choices=dict(text=['ice', 'snow', 'fire'], label=['A', 'B', 'C']))  # fmt: skip
  winogrande = dict(sentence='The cup fell off the table because _ was tilted.', option1='the cup',
                    option2='the table', answer='2')  # fmt: skip
  for name, record, spec, texts, choices, gold in (
    ('piqa', piqa,
     dict(doc_to_text='Question: {{goal}}\nAnswer:', doc_to_choice=['{{sol1}}', '{{sol2}}'],
          doc_to_target='{{label}}'),
     ('Question: Boil water\nAnswer:',), (' use a pot', ' use a hat'), 0),
    ('arc', arc,
     dict(doc_to_text='Question: {{question}}\nAnswer:', doc_to_choice='choices.text',
          doc_to_label='choices.label', doc_to_target='{{answerKey}}'),
     ('Question: What is hot?\nAnswer:',), (' ice', ' snow', ' fire'), 2),
    ('winogrande', winogrande,
     dict(doc_to_text=["{{sentence.split('_')[0]}}{{option1}}",
                       "{{sentence.split('_')[0]}}{{option2}}"],
          doc_to_choice=["{{sentence.split('_')[1].strip()}}"] * 2,
          doc_to_target='{{answer | int - 1}}'),
     ('The cup fell off the table because the cup', 'The cup fell off the table because the table'),
     (' was tilted.', ' was tilted.'), 1),
  ):  # fmt: skip
    write(tmp_path / f'{name}.jsonl', [record])
    path = task(tmp_path, kind='multiple_choice', files=f'{name}.jsonl', **spec)
    ((example,), _) = read_examples(find_tasks(path)[0][1])
    assert (example.prompts, example.choices, example.gold) == (texts, choices, gold)


def test_built_in_tasks_know_the_forms_of_their_records(tmp_path):
  given = write(tmp_path / 'a.jsonl', [dict(context='He said', continuation='no')])
  text = write(tmp_path / 'b.jsonl', [dict(text='He said no')])
  for path in (given, text):
    ((example,), _) = read_examples(find_tasks(f'lambada:{path}')[0][1])
    assert (example.prompts, example.choices) == (('He said',), (' no',))
  paxs = write(tmp_path / 'c.jsonl', [dict(passage='Ice is cold.', question='is it', answer=True)])
  ((example,), _) = read_examples(find_tasks(f'boolq:{paxs}')[0][1])
  assert example.prompts == ('Ice is cold.\nquestion: is it?\nanswer:',)
  assert (example.choices, example.gold) == ((' no', ' yes'), 1)


@pytest.mark.parametrize(
  ('pattern', 'compared', 'found'),
  [
    ('', ' so  4', 'so  4'),
    (r'-?\d+', ' so  4', '4'),
    (r'<\|think\|>(.*)', '<|think|> so  4', 'so  4'),
    ('<.think.>(.*)|(.*)', ' so  4', ''),
    (r'<0>(.*)', ' so <0> 4', '4'),
  ],
)
def test_special_tokens_are_compared_only_where_a_pattern_names_them(pattern, compared, found):
  parts = [Mark('<|think|>'), ' so ', Mark('<0>'), ' 4', Mark('<|end|>')]
  answer = Completion([], [], shown(parts), 'stop', parts=parts)
  assert compared_text(answer, pattern) == compared
  assert matched(compared, pattern) == found


def test_patterns():
  assert matched('so 3 + 4 is\n#### 7', r'#### (-?\d+)') == '7'
  assert matched('first 3, then 12.', r'-?\d+') == '12'
  assert matched(' yes ', '') == 'yes'
  assert matched('none', r'\d+') is None
  assert matched('P', '(x)|(P)') == 'P'


GOOD = dict(kind='cloze', files='a.jsonl', doc_to_text='{{a}}', doc_to_target='{{b}}')


@pytest.mark.parametrize(
  ('record', 'spec', 'match'),
  [
    (dict(a='x'), GOOD, r"a.jsonl:1: '{{b}}' cannot be written: 'b' is undefined"),
    (dict(a='x', b='y'), GOOD | dict(kind='guess'), "kind 'guess' is unknown"),
    (dict(a='x', b='y'), GOOD | dict(kind='text'), 'doc_to_text is not for kind "text"'),
    (dict(a='x', b='y'), dict(kind='text', files='a.jsonl', doc_to_target='{{a}}', chat=True),
     'chat is not for kind "text"'),
    (dict(a='x', b='y'), GOOD | dict(kind='code', pass_at=[1]), 'programs that a model wrote: use'),
    (dict(a='x', b='y'), GOOD | dict(more=1), "'more' is unknown; use one of kind, files"),
    (dict(a='x', b='y'), {'kind': 'cloze', 'files': 'a.jsonl'}, "has no 'doc_to_text'"),
    (dict(a='x', b='y'), GOOD | dict(files='gone.jsonl'), r'gone\.jsonl is not a file'),
    (dict(a='x', b='y'), GOOD | dict(kind='multiple_choice'), 'needs doc_to_choice'),
    (dict(a='x', b='7'), GOOD | dict(kind='multiple_choice', doc_to_choice=['{{a}}']),
     "a.jsonl:1: the answer '7' is neither a label nor a number"),
    (dict(a='x', b='0'), GOOD | dict(kind='multiple_choice', doc_to_choice='c.d'),
     "a.jsonl:1: field 'c.d' is missing"),
    (dict(a='x', b='y'), GOOD | dict(doc_to_text='{{a'), 'a.jsonl:1: .* cannot be written'),
    (dict(a='x', b='y'), GOOD | dict(target_pattern='('), 'is not a regular expression'),
    (dict(a='x', b=' '), GOOD, "a.jsonl:1: the answer '{{b}}' is empty"),
    (dict(a='x', b='0', c=['', 'z']), GOOD | dict(kind='multiple_choice', doc_to_choice='c'),
     'a.jsonl:1: a choice is empty'),
    (dict(a='x', b=None), GOOD, r"a.jsonl:1: '{{b}}' cannot be written: a field is null"),
    (dict(a='x', b='0', c=['y', None]), GOOD | dict(kind='multiple_choice', doc_to_choice='c'),
     'a.jsonl:1: a field is null'),
    (dict(a='x', b='D', c=['y', 'z'], l=['A', 'B', 'C', 'D']),
     GOOD | dict(kind='multiple_choice', doc_to_choice='c', doc_to_label='l'),
     "a.jsonl:1: 'l' holds no list of 2 labels"),
    (dict(a='x', b='y'), GOOD | dict(kind='generate', target_pattern='#'),
     "a.jsonl:1: target_pattern '#' is not in the answer"),
    (dict(a='x', b='y'), GOOD | dict(doc_to_text=['{{a}}']), 'only multiple_choice has'),
    (dict(a='x', b='y'), GOOD | dict(doc_to_text=None), 'doc_to_text cannot be None'),
    (dict(a='x', b='y'), GOOD | dict(files=[3]), r'files cannot be \[3\]'),
    (dict(a='x', b='y'), GOOD | dict(max_new_tokens='5'), "max_new_tokens cannot be '5'"),
    (dict(a='x', b='y'), GOOD | dict(files='hf:/no/such/train'), 'hf:/no/such/train cannot'),
    (dict(a='x', b='y'), GOOD | dict(doc_to_text='{{range(10**9) | list}}'), 'a.jsonl:1: '),
  ],
)  # fmt: skip
def test_bad_tasks_are_named(record, spec, match, tmp_path):
  write(tmp_path / 'a.jsonl', [record])
  with pytest.raises(UserError, match=match):
    read_examples(find_tasks(task(tmp_path, **spec))[0][1])


@pytest.mark.parametrize(
  ('text', 'match'),
  [
    ('hellaswag', 'is neither'),
    ('lambada', 'no TFDS dataset lambada'),
    ('boolq:a.jsonl', 'needs the'),
  ],
)
def test_tasks_that_are_none(text, match, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  write(tmp_path / 'a.jsonl', [dict(x=1)])
  with pytest.raises(UserError, match=match):
    find_tasks(text)


@pytest.mark.parametrize(('target', 'gold'), [(1, 1), ('1', 1), ('3', 1), ('9', None), ('B', 2)])
def test_the_right_choice_by_label_number_or_text(target, gold, tmp_path):
  """A number means a number, as in the harness, even if the choices are numbers too."""
  write(tmp_path / 'a.jsonl', [dict(a='x', b=target, c=['1', '3', '0'], l=['X', 'Y', 'B'])])
  spec = GOOD | dict(kind='multiple_choice', doc_to_choice='c', doc_to_label='l')
  spec = find_tasks(task(tmp_path, **spec))[0][1]
  if gold is None:
    with pytest.raises(UserError, match="the answer '9' is neither a label nor a number"):
      read_examples(spec)
  else:
    assert read_examples(spec)[0][0].gold == gold


def test_names_of_fields_and_a_single_end(tmp_path):
  write(tmp_path / 'a.jsonl', [dict(a='{{x}}', b=7)])
  spec = GOOD | dict(kind='generate', doc_to_text='a', doc_to_target='b', until='Question:')
  spec = find_tasks(task(tmp_path, **spec))[0][1]
  (example,), _ = read_examples(spec)
  assert (example.prompts, example.target, spec.until) == (('{{x}}',), '7', ('Question:',))


@pytest.mark.parametrize(('answer', 'gold'), [(True, 1), ('True', 1), ('no', 0), (0, 0)])
def test_boolq_answers(answer, gold, tmp_path):
  path = write(tmp_path / 'b.jsonl', [dict(passage='p', question='q', answer=answer)])
  assert read_examples(find_tasks(f'boolq:{path}')[0][1])[0][0].gold == gold
  path = write(tmp_path / 'b.jsonl', [dict(passage='p', question='q', answer='perhaps')])
  with pytest.raises(UserError, match=r"b.jsonl:1: .*'perhaps' says neither yes nor no"):
    read_examples(find_tasks(f'boolq:{path}')[0][1])


def test_unreadable_records_are_left_out_only_if_asked_and_counted(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"a": "x", "b": "y"}\n{"a": "x"}\n{"a"\n{"a": "z", "b": "y"}\n')
  spec = find_tasks(task(tmp_path, **GOOD))[0][1]
  with pytest.raises(UserError, match=r'a\.jsonl:2: '):
    read_examples(spec)
  examples, unreadable = read_examples(spec, skip_unreadable=True)
  assert ([e.prompts[0] for e in examples], unreadable) == (['x', 'z'], 2)


def test_tasks_between_commas(tmp_path):
  a = write(tmp_path / 'a.jsonl', [dict(text='one two')])
  b = write(tmp_path / 'b.jsonl', [dict(passage='p', question='q', answer=True)])
  found = read_tasks(
    [
      f'lambada:{a},{a},boolq:{b}',
      task(tmp_path, **GOOD | dict(doc_to_target='{{text}}', doc_to_text='', files='a.jsonl')),
    ]
  )
  assert [(t.name, len(t.examples)) for t in found] == [('lambada', 2), ('boolq', 1), ('task', 1)]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('speaker')
  runs.run(folder, config=CONFIG)
  return folder


def evaluate(trained, *flags: str, devices: int = 1) -> subprocess.CompletedProcess:
  return runs.module(
    'paxlite', 'zero-shot', f'--checkpoint={trained}', *flags,
    '--import=tests.unit.generation.test_decoding', devices=devices, code=None,
  )  # fmt: skip


def distributed(count: int, module: str, *flags: str) -> list[subprocess.CompletedProcess]:
  """Runs the tool on `count` processes of one device each."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  started = [
    runs.started(
      [
        sys.executable, '-m', 'tests.support.distributed',
        str(i), str(count), str(port), module, *flags,
      ],
      runs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i in range(count)
  ]  # fmt: skip
  ended = [p.communicate(timeout=300) for p in started]
  for process, (_, stderr) in zip(started, ended, strict=True):
    assert process.returncode == 0, stderr
  return [
    subprocess.CompletedProcess(p.args, p.returncode, *out)
    for p, out in zip(started, ended, strict=True)
  ]


def test_a_folder_that_cannot_be_made_is_refused_before_the_checkpoint_is_read(tmp_path):
  path = write(tmp_path / 'l.jsonl', [dict(context='it', continuation='came')])
  flags = ['--checkpoint=nowhere', '--tasks', f'lambada:{path}']
  with pytest.raises(UserError, match=r'--output=.* cannot be written: Not a directory'):
    tool.main([*flags, f'--output={path}/out'])
  with pytest.raises(UserError, match='nowhere'):
    tool.main(flags)


@pytest.mark.slow
def test_the_tool_says_what_it_cut_and_left_out(trained, tmp_path):
  long = ' '.join(['in those days it came to pass'] * 30)
  path = write(tmp_path / 'l.jsonl', [
    dict(context=long, continuation='that'), dict(context='it', continuation='came'), dict(x=1),
  ])  # fmt: skip
  flags = ['--tasks', f'lambada:{path}']
  assert "l.jsonl:3: '{{context}}' cannot be written" in evaluate(trained, *flags).stderr
  flags.append('--skip_unreadable')
  result = evaluate(trained, *flags, f'--output={tmp_path / "out"}')
  assert "1 prompt longer than the model's context, cut at the beginning" in result.stdout
  assert '1 unreadable records left out' in result.stdout
  found = json.loads((tmp_path / 'out' / 'results.json').read_text())['lambada']
  assert (found['num_examples'], found['truncated'], found['unreadable']) == (2, 1, 1)
  (tmp_path / 'l.jsonl').write_text('no\n' + (tmp_path / 'l.jsonl').read_text())  # invalid
  result = evaluate(trained, *flags)
  assert '2 unreadable records left out' in result.stdout
  result = evaluate(trained, *flags, '--too_long=error')
  assert 'l.jsonl:2: a text of ' in result.stderr
  assert 'is too long: the model takes ' in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_tool_counts_every_example_once_on_any_mesh(trained, tmp_path):
  """There are 13 examples, which neither a batch nor 8 devices divide."""
  words = ['and', 'it', 'came', 'to', 'pass', 'in', 'those', 'days', 'that', 'he', 'went', 'out']
  lambada = write(tmp_path / 'l.jsonl', [
    dict(context=' '.join(words[: i % 7 + 2]), continuation=words[i % 7 + 2]) for i in range(13)
  ])  # fmt: skip
  boolq = write(tmp_path / 'b.jsonl', [
    dict(passage=' '.join(words[:i]), question='is it so', answer=bool(i % 2)) for i in range(1, 6)
  ])  # fmt: skip
  spec = task(
    tmp_path, kind='generate', files='l.jsonl', doc_to_text='{{context}}',
    doc_to_target='{{continuation}}', generation_pattern=r'\w+', max_new_tokens=4,
  )  # fmt: skip
  found = {}
  for devices, tokens in ((1, 4096), (1, 40), (8, 640)):
    mesh = '--fdl.ICI_MESH_SHAPE=[2,4,1]' if devices == 8 else '--fdl.ICI_MESH_SHAPE=[1,1,1]'
    out = tmp_path / f'{devices}_{tokens}'
    result = evaluate(
      trained, '--tasks', f'lambada:{lambada}', f'boolq:{boolq}', spec, mesh,
      f'--batch_tokens={tokens}', f'--output={out}', devices=devices,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found[out] = json.loads((out / 'results.json').read_text())
    assert len((out / 'lambada.jsonl').read_text().splitlines()) == 13
    assert 'lambada: 13 examples' in result.stdout
  first = next(iter(found.values()))
  assert {k: v['num_examples'] for k, v in first.items()} == dict(lambada=13, boolq=5, task=13)
  assert first['lambada']['metrics'].keys() == {'acc', 'perplexity_per_word'}
  assert first['boolq']['metrics'].keys() == {'acc', 'acc_norm'}
  for other in found.values():
    for name, result in first.items():
      for metric, m in result['metrics'].items():
        assert math.isclose(m['value'], other[name]['metrics'][metric]['value'], rel_tol=1e-4)
  result = evaluate(trained, '--tasks', f'lambada:{lambada}', '--limit=3')
  assert 'lambada: 3 examples' in result.stdout
  processes = distributed(
    2, 'paxlite.eval.commands.zero_shot', f'--checkpoint={trained}', '--tasks',
    f'lambada:{lambada}', f'boolq:{boolq}', spec, '--fdl.ICI_MESH_SHAPE=[1,2,1]',
    '--batch_tokens=80', f'--output={tmp_path / "distributed"}',
    '--import=tests.unit.generation.test_decoding',
  )  # fmt: skip
  assert 'lambada: 13 examples' in processes[0].stdout
  assert 'lambada' not in processes[1].stdout
  other = json.loads((tmp_path / 'distributed' / 'results.json').read_text())
  for name, result in first.items():
    assert other[name]['num_examples'] == result['num_examples']
    for metric, m in result['metrics'].items():
      assert math.isclose(m['value'], other[name]['metrics'][metric]['value'], rel_tol=1e-4)
  for flags, message in (
    (['--tasks', 'x'], 'error: --tasks: '),
    (['--tasks', f'lambada:{lambada}', '--limit=0'], 'error: --limit=0'),
    (['--tasks', f'lambada:{lambada}', f'lambada:{lambada}'], 'is listed twice'),
  ):
    result = evaluate(trained, *flags)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert message in result.stderr


def test_a_file_of_several_tasks_names_each(tmp_path):
  write(tmp_path / 'a.jsonl', [dict(a='x', b='y')])
  path = tmp_path / 'all.json'
  path.write_text(json.dumps([GOOD | dict(name='one'), GOOD | dict(name='two', chat=True)]))
  assert [(t.name, t.spec.chat) for t in read_tasks([str(path)])] == [('one', False), ('two', True)]
  path.write_text(json.dumps([GOOD, GOOD]))
  with pytest.raises(UserError, match=r'all\.json: task 1 needs a "name"'):
    read_tasks([str(path)])
  path.write_text(json.dumps([GOOD | dict(name='one'), GOOD | dict(name='two', kind='guess')]))
  with pytest.raises(UserError, match=r"all\.json: two: kind 'guess' is unknown"):
    read_tasks([str(path)])
  for text, match in (('[]', 'holds no task'), ('[3]', 'is not a JSON object'), ('', 'is empty')):
    path.write_text(text)
    with pytest.raises(UserError, match=match):
      read_tasks([str(path)])


def test_a_chat_has_no_space_before_the_answer_unless_the_task_says_so(tmp_path):
  write(tmp_path / 'a.jsonl', [dict(a='x', b='y')])
  for changes, chat, choice in (
    ({}, False, ' y'), ({}, True, 'y'), (dict(chat=True), False, 'y'),
    (dict(chat=True, target_delimiter='\n'), False, '\ny'),
  ):  # fmt: skip
    (found,) = read_tasks([task(tmp_path, **GOOD | changes)], chat=chat)
    assert found.examples[0].choices == (choice,)
  with pytest.raises(UserError, match='"system" is the beginning of a chat'):
    read_tasks([task(tmp_path, **GOOD | dict(system='Be brief.'))])


@pytest.mark.slow
def test_beginnings_that_rows_share_are_read_once(monkeypatch):
  """The scores are those of whole rows, also where alternatives differ in their last token."""
  model, params = made('llama')
  few_shot = list(range(5, 45))
  asked = [
    Continuation([*few_shot, *question], answer)
    for question in ([3, 4], [9], [3, 4, 7, 8], few_shot[:12])
    for answer in ([11], [12], [13, 14], [13, 15, 16])
  ]
  asked += [Continuation(few_shot[:20], [50, 51]), Continuation(list(range(60, 5, -1)), [1, 2])]
  reads = []
  read = Engine._read
  monkeypatch.setattr(Engine, '_read', lambda self, jobs: (reads.append(jobs), read(self, jobs)))
  shared = Scorer(model, params, 64)(asked)
  assert reads
  monkeypatch.setattr(scoring, '_WORTH_SHARING', 1000)
  whole = Scorer(model, params, 64)(asked)
  for a, b in zip(shared, whole, strict=True):
    np.testing.assert_allclose(a.log_likelihood, b.log_likelihood, atol=1e-5)
    assert (a.is_greedy, a.is_truncated) == (b.is_greedy, b.is_truncated)


@pytest.mark.slow
def test_bits_per_byte_of_texts_are_those_of_their_logits(trained, tmp_path):
  texts = ['who is there?', 'a cafe\u0301', 'in the beginning']
  write(tmp_path / 'a.jsonl', [dict(a=text) for text in texts])
  spec = task(tmp_path, kind='text', files='a.jsonl', doc_to_target='{{a}}')
  out = tmp_path / 'out'
  done = evaluate(trained, '--tasks', spec, '--chat', f'--output={out}')
  assert done.returncode == 0, done.stderr
  found = json.loads((out / 'results.json').read_text())['task']['metrics']['bits_per_byte']
  model = paxlite.load(str(trained))
  contexts, bits = contexts_of(model.inference), []
  for text in texts:
    ids = [contexts.needed_prefix, *contexts.encode(text, starts=False)]
    logits = np.asarray(model.logits(ids), np.float64)[:-1]
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    bits.append(-logs[np.arange(len(logs)), ids[1:]].sum() / math.log(2))
  sizes = [len(text.encode()) for text in texts]
  assert math.isclose(found['value'], sum(bits) / sum(sizes), rel_tol=1e-5)
  rows = [json.loads(line) for line in (out / 'task.jsonl').read_text().splitlines()]
  assert [row['bytes'] for row in rows] == sizes
