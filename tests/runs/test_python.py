"""`make demo` and `make test` find a Python that works, or say what to install."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support import runs

FIND = runs.ROOT / 'scripts' / 'find_python.sh'
SHIM = '#!/bin/sh\necho "pyenv: python3.12: command not found" >&2\nexit 127\n'
OLD = '#!/bin/sh\nexit 1\n'  # what an older Python answers to the question


@pytest.fixture
def machine(tmp_path):
  """An empty home folder, and a PATH on which only `make` and what it needs are."""
  for name in ('home', 'bin'):
    (tmp_path / name).mkdir()
  for name in ('sh', 'ls', 'make', 'nproc'):
    (tmp_path / 'bin' / name).symlink_to(shutil.which(name))
  return tmp_path


def environment(machine, **variables):
  return {'HOME': str(machine / 'home'), 'PATH': str(machine / 'bin'), **variables}


def script(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def python(path):
  """Makes a Python of this version; a link to that of an environment would be another one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.symlink_to(os.path.realpath(sys.executable))


def found(machine, *arguments, **variables):
  return subprocess.run(
    ['sh', FIND, *arguments], env=environment(machine, **variables), capture_output=True, text=True,
    check=False,
  )  # fmt: skip


@pytest.mark.parametrize(
  'where',
  [
    'bin/python3.12',
    'bin/python3.13',
    'bin/python3.14',
    'bin/python3',
    'home/.pyenv/versions/3.12.1/bin/python3',
    'home/.local/share/uv/python/cpython-3.13.2-linux-x86_64-gnu/bin/python3',
  ],
)
def test_a_shim_that_fails_and_an_older_python_are_passed_over(machine, where):
  script(machine / 'bin' / 'python3.12', SHIM)
  script(machine / 'bin' / 'python3', OLD)
  (machine / where).unlink(missing_ok=True)
  python(machine / where)
  result = found(machine)
  assert (result.returncode, result.stdout, result.stderr) == (0, f'{machine / where}\n', '')


@pytest.mark.parametrize('target', ['demo', 'test'])
@pytest.mark.parametrize('kind', ['a shim', 'an older one', 'none'])
def test_without_one_a_line_says_what_to_install(machine, kind, target):
  if kind == 'a shim':
    script(machine / 'bin' / 'python3.12', SHIM)
  if kind == 'an older one':
    script(machine / 'bin' / 'python3', OLD)
  venv = machine / 'venv'
  result = subprocess.run(
    ['make', '--silent', target, f'VENV={venv}'], cwd=runs.ROOT, env=environment(machine),
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert result.returncode == 2
  first, *rest = result.stderr.splitlines()
  assert first.startswith('paxlite needs Python 3.12 or newer, and none was found. Install one (')
  assert all('make: ***' in line for line in rest)
  assert not venv.exists()


def test_a_python_that_was_asked_for_is_checked(machine):
  script(machine / 'bin' / 'old', OLD)
  python(machine / 'bin' / 'python3.12')
  for name in ('old', 'no-such'):
    result = found(machine, name)
    assert (result.returncode, result.stdout) == (1, '')
    assert f'PYTHON={name} is not a Python that works, is 3.12 or newer' in result.stderr
  assert found(machine, 'python3.12').stdout == f'{machine}/bin/python3.12\n'


@pytest.mark.slow
def test_an_environment_is_kept_or_made_anew(machine):
  """A real one is made twice, and nothing else is ever deleted."""
  environment_of = lambda *arguments: subprocess.run(
    ['sh', FIND.with_name('make_environment.sh'), machine / 'venv', *arguments],
    env=environment(machine), capture_output=True, text=True, check=False,
  )  # fmt: skip
  mine = machine / 'venv' / 'mine.txt'
  script(mine, 'a file')
  refused = environment_of()
  assert (refused.returncode, mine.read_text()) == (1, 'a file')
  assert 'is no environment of Python and not empty: give another folder' in refused.stderr
  mine.unlink()

  python(machine / 'bin' / 'python3.12')
  assert environment_of().returncode == 0
  own = machine / 'venv' / 'bin' / 'python'
  subprocess.run([own, '-m', 'pip', '--version'], check=True, capture_output=True)
  script(mine, 'a file')
  for arguments in ([], ['python3.12']):
    assert (environment_of(*arguments).returncode, mine.exists()) == (0, True)
  own.unlink()
  script(own, OLD)
  assert (environment_of('no-such').returncode, mine.exists()) == (1, True)
  assert (environment_of().returncode, mine.exists()) == (0, False)
