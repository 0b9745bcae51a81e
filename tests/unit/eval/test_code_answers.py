"""Programs that a model wrote: where they run, and how they count."""

import itertools
import json
import os
import pathlib
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.eval import code_sandbox
from paxlite.eval.code_answers import check_allowed, failures, pass_at
from paxlite.eval.code_sandbox import CodeSandbox
from paxlite.eval.eval_tasks import read_tasks

RECORD = {
  'prompt': 'def twice(x):\n',
  'entry_point': 'twice',
  'test': 'def check(f):\n  assert f(2) == 4 and f("a") == "aa"',
}
TASK = {
  'kind': 'code',
  'files': 'human_eval.jsonl',
  'doc_to_text': '{{prompt}}',
  'doc_to_target': '{{prompt}}{{generated}}\n{{test}}\ncheck({{entry_point}})',
  'repeats': 4,
  'pass_at': [1, 3],
}


def read(folder, **changes):
  (folder / 'human_eval.jsonl').write_text(json.dumps(RECORD) + '\n')
  (folder / 'task.json').write_text(json.dumps(TASK | changes))
  (task,) = read_tasks([str(folder / 'task.json')])
  return task


@pytest.fixture
def sandbox():
  try:
    code_sandbox.check()
  except UserError as e:
    pytest.skip(str(e))
  return CodeSandbox(20)


@pytest.mark.parametrize(('passed', 'count'), [(0, 5), (2, 5), (5, 5), (1, 1), (4, 7)])
def test_pass_at_k_is_the_share_of_choices_with_one_that_passes(passed, count):
  answers = [i < passed for i in range(count)]
  for k in range(1, count + 1):
    choices = [any(chosen) for chosen in itertools.combinations(answers, k)]
    assert abs(pass_at(k, passed, count) - sum(choices) / len(choices)) < 1e-12


def test_answers_pass_or_say_why_not(tmp_path, sandbox):
  task = read(tmp_path)
  answers = ['  return 2 * x', '  return x * x', '  return 2 *', '  raise KeyError("no")']
  (found,) = failures(task.spec, task.examples, [answers])
  assert [failure if failure is None else failure[:14] for failure in found] == [
    None, 'TypeError: can', 'SyntaxError: i', "KeyError: 'no'",
  ]  # fmt: skip
  fenced = read(tmp_path, generation_pattern='(?s)```python\n(.*?)```', pass_at=[1])
  answers = ['So:\n```python\n  y = x\n  return x + y\n```\nDone.', 'no program']
  (found,) = failures(fenced.spec, fenced.examples, [answers])
  assert found[0] is None is not found[1]


def test_a_program_has_no_network_no_files_and_no_time(tmp_path, sandbox):
  place = pathlib.Path(__file__).parent / 'written'
  cases = {
    'import socket; socket.create_connection(("127.0.0.1", 22), 1)': 'unreachable',
    f'open({str(place)!r}, "w")': '',  # there is no such folder, or it is read-only
    'open("/etc/written", "w")': 'Read-only',
    f'open({str(tmp_path / "written")!r}, "w")': '',  # /tmp is another one
    'open("/proc/sys/kernel/hostname", "w").write("other")': 'Read-only',
    'import subprocess; subprocess.run(["mount", "-o", "remount,rw", "/"], check=True)': 'non-zero',
    'x = "a" * (3 << 30)': 'MemoryError',
    'open("/tmp/x", "w").write("a" * (20 << 20))': 'too large',
    f'import os; os.kill({os.getpid()}, 9)': 'No such process',
    'import os; print(os.environ["SECRET_OF_TESTS"])': 'KeyError',
    'import os; assert os.path.exists("/run") or os.listdir("/tmp")': 'AssertionError',
    'open("/dev/pts/0")': 'No such file',
    'raise SystemExit(0)': 'ended before its last line',
    'import os; os._exit(0)': 'ended before its last line',
    'x = "\0"': 'null bytes',
    'x = 1\n' * 100_000 + '1 / 0': 'ZeroDivisionError',
  }
  os.environ['SECRET_OF_TESTS'] = 'x'
  for (program, match), said in zip(cases.items(), sandbox.failures([*cases]), strict=True):
    assert said is not None, program
    assert match in said, (program, said)
  assert not place.exists()
  assert not (tmp_path / 'written').exists()
  assert sandbox.failure('print("a" * 1_000_000 * 20)') is None
  assert sandbox.failure('open("/tmp/x", "w").write("a"); import json') is None


@pytest.mark.slow
def test_what_a_program_started_ends_with_it(sandbox):
  start = time.monotonic()
  quick = CodeSandbox(2)
  said = quick.failure('import subprocess as s, time; s.Popen(["sleep", "987"]); time.sleep(99)')
  assert said == 'it was not done after 2 seconds'
  # a session of its own, and no wish to end with its parent
  flees = 'import ctypes, os; os.fork() or os.setsid(); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n'
  said = quick.failure(f'{flees}os.execvp("sleep", ["sleep", "987"])')
  assert said == 'it was not done after 2 seconds'
  assert time.monotonic() - start < 30
  time.sleep(0.2)
  commands = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline') if p.exists()]
  assert b'sleep\x00987\x00' not in commands


def test_no_program_runs_unless_it_is_allowed(tmp_path, monkeypatch):
  task = read(tmp_path)
  with pytest.raises(UserError, match=r'nobody has read them.*--run_code \(EVAL_RUN_CODE=True\)'):
    check_allowed(task.spec, run_code=False)
  monkeypatch.setattr(code_sandbox.shutil, 'which', lambda name: None)
  code_sandbox.check.cache_clear()
  with pytest.raises(UserError, match='not possible here: there is no program unshare'):
    check_allowed(task.spec, run_code=True)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(pass_at=[5]), 'pass_at 5 needs as many repeats'),
    (dict(pass_at=[]), r'pass_at cannot be \[\]'),
    (dict(doc_to_target='{{test}}'), 'has no {{generated}} in it, or changes it'),
    (dict(doc_to_target='{{generated | upper}}'), 'has no {{generated}} in it, or changes it'),
    (dict(temperature=0), 'with temperature 0 all 4 repeats are the same answer'),
    (dict(num_fewshot=1, fewshot_files='human_eval.jsonl'), 'num_fewshot is not for code'),
    (dict(kind='generate'), 'pass_at is for code'),
    (dict(kind='cloze'), 'repeats and temperature are for generate and code'),
    (dict(timeout=0), 'timeout cannot be 0'),
    (dict(temperature=-1), 'temperature cannot be -1'),
  ],
)
def test_tasks_whose_values_do_not_fit(tmp_path, changes, match):
  with pytest.raises(UserError, match=match):
    read(tmp_path, **changes)
