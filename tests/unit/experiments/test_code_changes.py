"""What a start says of code that was edited since the start before."""

import importlib
import random
import re
import sys
import zlib

import fiddle as fdl
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.code_changes import changes, other_code, refuse_other_code
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.identity import write_configuration
from paxlite.proof.starts import starts
from tests.runs.test_rollouts import Letters

MODULE = '''
"""A user's experiment."""
import functools
import time

import jax
import optax
from paxlite.config.templates import config, template
from paxlite.experiments.demo import TinyGPT
from paxlite.layers.norms import LayerNorm

import {name}_helpers
try:
  from .{name}_helpers import TIMES as MANY
except ImportError:
  from {name}_helpers import TIMES as MANY

RATE = 0.5
SIZE = len({name}_helpers.BASE)
STARTED, CLOCK = time.monotonic_ns(), {name}_helpers.now()


@functools.partial(jax.jit, static_argnums=1)
def twice(x, times=2):
  """Doubles."""
  # a comment
  return times * x


class Base(LayerNorm):
  def shift(self, x):
    return x + 1


class Own(Base):
  """A layer."""

  def __call__(self, x):
    assert STARTED + CLOCK
    return twice(super().__call__(x)) * RATE + {name}_helpers.three() + MANY + SIZE + drawn(x)


def momentum(schedule):
  return optax.sgd(schedule, 0.9)


class Tiny(TinyGPT):
  ICI_MESH_SHAPE = [1, 1, 1]

  def losses(self):
    found = super().losses()
    found['avg_xent'].coefficient = 1e-3
    return found

  def model(self):
    made = super().model()
    made.norm_tpl = template(Own)
    return made

  def transformation(self):
    return config(momentum, schedule=self.schedule())


class Curve:
  def at(self, x):
    return x * 1


def made(power):
  def inner(x):
    return x ** power
  return inner


CFG = {'beta': 1}
CFG['gamma'] = 2
CURVE = Curve()
POWER = made(1.0)


def drawn(x):
  return CFG['beta'] * CURVE.at(POWER(x.sum()))

class Paid:
  """An environment."""

  def reward(self, record, messages):
    return drawn(record) * {name}_helpers.three()


def paid(record, answer):
  # a comment
  return len(answer) * RATE
'''
HELPERS = """
import time

BASE = [4]
TIMES = 3

def three():
  return 3

def now():
  return time.monotonic_ns()
"""
EDITS = {
  'a coefficient': ('1e-3', '1e-1', r'task\.losses\.avg_xent\.coefficient 0\.001 → 0\.1$'),
  'a loss': ("    return found\n", "    del found['aux_loss']\n    return found\n",
             r'task\.losses\.aux_loss paxlite\S*SownLosses → unset$'),
  'a layer': ('* RATE', '* 2 * RATE', r'NAME\.Own\.__call__ \(\S*NAME\.py, line 38\)$'),
  'a method that is new': ('  """A layer."""\n', '  def setup(self): pass\n',
                           r'NAME\.Own \(\S+, line 35\)$'),
  'a base class': ('x + 1', 'x + 2', r'NAME\.Base\.shift \('),
  'a helper behind jit': ('times * x', 'times + x', r'NAME\.twice \('),
  'its argument': ('times=2', 'times=3', r'NAME\.twice \('),
  'a number': ('RATE = 0.5', 'RATE = 0.6', r'NAME\.RATE \(\S*NAME\.py, line 18\)$'),
  'a number of a number': ('BASE = [4]', 'BASE = [5]', r'NAME_helpers\.BASE \('),
  'an imported number': ('TIMES = 3', 'TIMES = 4', r'NAME_helpers\.TIMES \('),
  'a helper elsewhere': ('return 3', 'return 4',
                         r'NAME_helpers\.three \(\S*NAME_helpers\.py, line 7\)$'),
  'a value in a dictionary': ("{'beta': 1}", "{'beta': 2}", r'NAME\.CFG \('),
  'a change of a dictionary': ("['gamma'] = 2", "['gamma'] = 3", r'NAME\.CFG \('),
  'a method of an object': ('x * 1', 'x * 2', r'NAME\.Curve\.at \('),
  'a value in a closure': ('made(1.0)', 'made(2.0)', r'NAME\.POWER \('),
  'an optimizer': ('0.9', '0.8', r'NAME\.momentum \('),
  'a class': ('template(Own)', 'template(Base)',
              r'task\.model\.norm_tpl template of NAME\.Own → template of NAME\.Base$'),
}  # fmt: skip
SAME = {
  'a comment': ('# a comment', '# another'),
  'docstrings': ('"""A layer."""', '"""Another."""'),
  'formatting': ('optax.sgd(schedule, 0.9)', 'optax.sgd(\n    schedule,\n    0.90,\n  )'),
  'an attribute': ('ICI_MESH_SHAPE = [1, 1, 1]', 'ICI_MESH_SHAPE = [1, 1, 1]\n  MAX_STEPS = 77'),
  'a method of the same result': (
    '    return found\n',
    '    found = dict(found)\n    return found\n',
  ),
}


@pytest.fixture
def module(tmp_path, monkeypatch, request):
  """Returns a function that imports the user's module anew, with an edit."""
  name = f'own_{zlib.crc32(request.node.name.encode())}'
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)

  def load(old='', new=''):
    for which, text in ((name, MODULE.replace('{name}', name)), (f'{name}_helpers', HELPERS)):
      (tmp_path / f'{which}.py').write_text(text.replace(old, new) if old else text)
      sys.modules.pop(which, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)

  yield load
  for which in (name, f'{name}_helpers'):
    sys.modules.pop(which, None)


@pytest.mark.cases(fast=6)
@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_that_changes_numbers_is_named(edit, module, tmp_path):
  old, new, expected = EDITS[edit]
  (tmp_path / 'run').mkdir()
  (tmp_path / 'b').mkdir()
  e = module().Tiny()
  write_configuration(e, tmp_path / 'run')
  assert changes(e, tmp_path / 'run') == []
  edited = module(old, new)
  (found,) = changes(edited.Tiny(), tmp_path / 'run')
  assert re.search(expected.replace('NAME', edited.__name__), found), found
  with pytest.raises(UserError, match=r'the code has changed since .*--accept_changes'):
    refuse_other_code(edited.Tiny(), tmp_path / 'run')
  write_configuration(edited.Tiny(), tmp_path / 'b')
  (said,) = other_code(tmp_path / 'run', tmp_path / 'b')
  assert said.removeprefix('the code of ').split(':')[0] in found


@pytest.mark.parametrize('edit', SAME)
def test_an_edit_that_changes_no_number_is_not_named(edit, module, tmp_path):
  write_configuration(module().Tiny(), tmp_path)
  e = module(*SAME[edit]).Tiny(SUMMARY_INTERVAL_STEPS=3, NUM_MICROBATCHES=2)
  assert changes(e, tmp_path) == []


@pytest.mark.parametrize(
  ('edit', 'expected'),
  [
    (('len(answer)', '-len(answer)'), r'NAME\.paid \(\S*NAME\.py, line \d+\)'),
    (('RATE = 0.5', 'RATE = 0.6'), r'NAME\.RATE \('),
    (('drawn(record) *', 'drawn(record) -'), r'NAME\.Paid\.reward \('),
    (("{'beta': 1}", "{'beta': 2}"), r'NAME\.CFG \('),
    (('# a comment', '# another'), None),
  ],
)
def test_rewards_and_environments_that_are_named_by_paths(edit, expected, module, tmp_path):
  values = dict(ICI_MESH_SHAPE=[1, 1, 1], VOCAB_PATH='v', TRAIN_FILES=['p.jsonl'])
  name = module().__name__
  e = Letters(**values, REWARDS=[f'{name}.paid'], ENVIRONMENT=f'{name}.Paid')
  write_configuration(e, tmp_path)
  assert changes(e, tmp_path) == []
  module(*edit)
  found = changes(e, tmp_path)
  assert len(found) == bool(expected)
  assert not expected or re.search(expected.replace('NAME', name), found[0]), found
  sys.modules[name].__dict__.pop('paid')  # its caller says that it is missing
  assert not any('.paid' in said for said in changes(e, tmp_path))


@pytest.mark.parametrize('seed', range(8))
def test_a_drawn_field_of_the_config_that_a_method_changes_is_named(seed, monkeypatch, tmp_path):
  write_configuration(TinyGPT(ICI_MESH_SHAPE=[1, 1, 1]), tmp_path)
  task = TinyGPT.task

  def fields(cfg, path='task'):
    for name, value in cfg.__arguments__.items():
      if isinstance(value, fdl.Buildable) and name != 'optimizer':
        yield from fields(value, f'{path}.{name}')
      elif isinstance(value, int | float | str):
        yield cfg, name, f'{path}.{name}'

  def edited(self):
    cfg = task(self)
    holder, name, path = random.Random(seed).choice(list(fields(cfg)))
    before = getattr(holder, name)
    setattr(holder, name, f'{before}_' if isinstance(before, str) else before + 1)
    found.append(f'{path} {before!r} → {getattr(holder, name)!r}')
    return cfg

  found: list[str] = []
  monkeypatch.setattr(TinyGPT, 'task', edited)
  said = changes(TinyGPT(MAX_STEPS=99, ICI_MESH_SHAPE=[1, 1, 1]), tmp_path)
  assert found[0] in said, (found, said)


def test_runs_of_before_and_of_another_paxlite_are_not_refused(module, tmp_path):
  write_configuration(module().Tiny(), tmp_path)
  sources = tmp_path / 'sources.json'
  other = sources.read_text().replace('"paxlite": "', '"paxlite": "0')
  e = module('1e-3', '1e-1').Tiny()
  assert changes(e, tmp_path)
  sources.write_text(other)
  assert changes(e, tmp_path) == []
  assert changes(module('x + 1', 'x + 2').Tiny(), tmp_path)
  sources.unlink()
  assert changes(e, tmp_path) == []


def test_a_start_that_accepts_changes_has_them_in_its_record(tmp_path):
  (tmp_path / 'data.jsonl').write_text('{"step": 0}\n{"step": 4, "code_changes": ["a.f"]}\n')
  assert [start.code_changes for start in starts(tmp_path)] == [(), ['a.f']]
