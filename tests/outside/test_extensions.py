"""A package adds to paxlite by being installed: an entry point, and no change of any file."""

import os
import re
import subprocess
import sys

import pytest

from paxlite import extensions
from paxlite.cli.command_line import import_asked
from paxlite.core.errors import UserError
from paxlite.core.extension import Command, Extension
from paxlite.experiments import options
from paxlite.experiments.demo import TinyGPT
from paxlite.files import schemes
from tests.support import runs

ENTRY = 'budgets = tests.outside.parts.package.extension:EXTENSION'


@pytest.fixture
def site(tmp_path):
  """A folder on sys.path in which a package with an entry point is installed."""
  return installed(tmp_path / 'site', ENTRY)


WITH_A_PART = {
  '__init__': 'from paxlite import Experiment, register\n',
  'extension': 'from paxlite.core.extension import Extension\n'
  "EXTENSION = Extension('theirs', parts=('theirs.parts:Mine',))\n",
  'parts': 'from paxlite.config.attribute_kinds import Run\n'
  'from paxlite.experiments.parts.part import Part\n'
  "class Mine(Part, subject='Mine'):\n"
  '  THEIR_NUMBER: Run[int] = 3  # a number\n',
}


def installed(folder, entry):
  about = folder / 'budgets-1.0.dist-info'
  about.mkdir(parents=True)
  (about / 'METADATA').write_text('Metadata-Version: 2.1\nName: budgets\nVersion: 1.0\n')
  (about / 'entry_points.txt').write_text(f'[paxlite.extensions]\n{entry}\n')
  return folder


def paxlite(site, *arguments, code=0):
  env = runs.environment() | {'PYTHONPATH': os.pathsep.join(map(str, (site, runs.ROOT)))}
  command = [sys.executable, '-m', 'paxlite', *arguments]
  found = subprocess.run(
    command, env=env, cwd=runs.ROOT, capture_output=True, text=True, timeout=300, check=False
  )
  assert found.returncode == code, found.stderr
  return found.stdout if code == 0 else found.stderr


def test_a_package_adds_a_command(site):
  assert '\n  budget           the steps that are left\n' in paxlite(site, '--help')
  assert paxlite(site, 'budget', '--help').startswith('usage: paxlite budget RUN')
  assert 'Did you mean paxlite budget?' in paxlite(site, 'bugdet', code=2)
  assert paxlite(site, 'completion', 'words', 'budge') == 'budget\n'


@pytest.mark.slow
def test_a_package_adds_an_attribute_and_a_callback(site, tmp_path):
  run = tmp_path / 'run'
  flags = f'--folder={run}', 'NUM_LAYERS=1', 'MAX_STEPS=4'
  printed = paxlite(site, 'train', 'TinyGPT', *flags, 'STEP_BUDGET=2')
  assert list(runs.losses(run)) == [1, 2]
  assert '\nSTEP_BUDGET: 2 steps\n' in printed
  assert '\n2 steps of the budget are used\n' in printed
  assert '\n2 steps of the budget' in paxlite(site, 'train', 'TinyGPT', *flags, 'STEP_BUDGET=2')
  assert paxlite(site, 'budget', str(run), '--budget=5') == '3\n'
  paxlite(site, 'train', 'TinyGPT', *flags, 'STEP_BUDGET=3')
  assert list(runs.losses(run)) == [1, 2, 3]
  assert 'STEP_BUDGET=-1 must not be negative' in paxlite(
    site, 'train', 'TinyGPT', 'STEP_BUDGET=-1', code=2
  )


def test_a_package_adds_an_optimizer_with_an_attribute(site):
  shown = paxlite(site, 'show', 'TinyGPT', 'OPTIMIZER=thrifty', 'THRIFT=0.25')
  assert re.search(r'^THRIFT += 0.25', shown, re.M)
  assert 'THRIFT' not in paxlite(site, 'show', 'TinyGPT', 'OPTIMIZER=soap')
  assert 'THRIFT=1 must be at least 0 and below 1' in paxlite(
    site, 'show', 'TinyGPT', 'OPTIMIZER=thrifty', 'THRIFT=1.0', code=2
  )


@pytest.mark.slow
def test_a_package_adds_a_scheme_of_paths(site, tmp_path, monkeypatch):
  shelf = tmp_path / 'shelf'
  shelf.mkdir()
  monkeypatch.setenv('SHELF', str(shelf))
  for name in ('one', 'two'):
    (shelf / f'{name}.txt').write_text(f'This is tale {name}. ' * 3000)
  flags = 'NUM_LAYERS=1', 'MAX_STEPS=2', 'MAX_SEQ_LEN=32', 'PERCORE_BATCH_SIZE=2'
  for place, folder in (('shelf:/', 'there'), (shelf, 'here')):
    files = f'--folder={tmp_path}/{folder}', f'TRAIN_FILES={place}/*.txt'
    paxlite(site, 'train', 'DemoGPT', *files, *flags)
  assert runs.losses(tmp_path / 'there') == runs.losses(tmp_path / 'here')
  assert 'only data can be read from shelf://, not written' in paxlite(
    site, 'train', 'TinyGPT', '--folder=shelf://run', code=2
  )


@pytest.mark.parametrize('first', ['theirs', 'paxlite.experiments.base', 'paxlite.__main__'])
def test_a_package_with_a_part_may_import_experiments(tmp_path, first):
  site = installed(tmp_path, 'theirs = theirs.extension:EXTENSION')
  (site / 'theirs').mkdir()
  for name, text in WITH_A_PART.items():
    (site / 'theirs' / f'{name}.py').write_text(text)
  env = runs.environment() | {'PYTHONPATH': os.pathsep.join(map(str, (site, runs.ROOT)))}
  show = f'import {first}; from paxlite import get; print(get("TinyGPT")().THEIR_NUMBER)'
  command = [sys.executable, '-c', show]
  assert subprocess.check_output(command, env=env, cwd=runs.ROOT, text=True) == '3\n'


def test_a_package_that_does_not_import_is_named(tmp_path):
  site = installed(tmp_path, 'broken = tests.outside.parts.absent:EXTENSION')
  assert paxlite(site, '--help', code=2).startswith(
    'error: the extension broken (tests.outside.parts.absent:EXTENSION) cannot be imported: No '
  )


FAULTY = {
  'an error': ("raise ValueError('my bug')", 'theirs:EXTENSION', 'my bug'),
  'no syntax': ('x = = 1', 'theirs:EXTENSION', 'invalid syntax'),
  'no name': ('', 'theirs:EXTENSION', 'has no attribute'),
}
GOOD = {'in a class': 'theirs:Box.EXTENSION', 'an extra': 'theirs:EXTENSION [more]'}
THEIRS = """
from paxlite.core.extension import Extension
class Box:
  EXTENSION = Extension('theirs', schemes={'mem': 'paxlite.files.schemes:Scheme'})
EXTENSION = Box.EXTENSION
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
  """Installs a module with an entry point of it, in this process."""

  def install(text, entry):
    site = installed(tmp_path / 'site', f'theirs = {entry}')
    (site / 'theirs.py').write_text(text)
    monkeypatch.syspath_prepend(site)
    extensions.found.cache_clear()

  yield install
  sys.modules.pop('theirs', None)
  extensions.found.cache_clear()


@pytest.mark.parametrize('case', FAULTY)
def test_a_faulty_module_of_a_package_is_named(named, case):
  text, entry, said = FAULTY[case]
  named(text, entry)
  with pytest.raises(UserError, match=rf'^the extension theirs \({entry}\) cannot be .*{said}'):
    extensions.found()


@pytest.mark.parametrize('case', GOOD)
def test_any_form_of_an_entry_point_is_read(named, case):
  named(THEIRS, GOOD[case])
  assert extensions.found()[-1].name == 'theirs'
  with pytest.raises(UserError, match=r'^mem://x: the extension names paxlite.files.schemes:Sch'):
    schemes.scheme_of('mem://x')


def test_what_a_leaf_adds_is_absent_without_it(monkeypatch, tmp_path):
  monkeypatch.setattr(extensions, 'BUILT_IN', [])
  monkeypatch.setitem(sys.modules, 'paxlite.aot', None)
  caches = extensions.found, options._parts, options._of
  for cache in caches:
    cache.cache_clear()
  try:
    assert extensions.found() == ()
    assert extensions.hint('flag', 'num_train_epochs') == ''
    assert extensions.missing('plan') == 'plan needs the extension aot, which is not installed'
    with pytest.raises(UserError, match=r'^LEAVE_OUT needs the extension run_data, which is not'):
      extensions.hook('LEAVE_OUT')
    with pytest.raises(UserError, match=r'^LORA_ALPHA needs the extension adapters, which is not'):
      type('Mine', (TinyGPT,), {'LORA_ALPHA': 4.0, '__module__': __name__})
    monkeypatch.setitem(sys.modules, 'paxlite.adapters.attributes', None)
    (tmp_path / 'of_leaf.py').write_text('from paxlite.adapters.attributes import AdapterChoices\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r'^--import=of_leaf needs paxlite\.adapters\.attrib'):
      import_asked('of_leaf')
  finally:
    for cache in caches:
      cache.cache_clear()


def test_what_is_there_is_not_lacking():
  assert extensions.lacking('LORA_ALPHA') == extensions.lacking('anything') == ''


def test_two_extensions_cannot_add_the_same(monkeypatch):
  twice = Extension('other', commands=(Command('plan', '', '', 'Machines'),))
  monkeypatch.setattr(extensions, '_of_packages', lambda: [twice])
  extensions.found.cache_clear()
  try:
    with pytest.raises(UserError, match=r'^the extensions aot and other both add plan: uninstall'):
      extensions.found()
  finally:
    extensions.found.cache_clear()


def test_the_table_says_what_the_leaves_add():
  assert {e.name: e.added for e in extensions.found()} == extensions.OFFERED
