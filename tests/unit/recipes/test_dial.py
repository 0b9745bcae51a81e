"""One dial: what follows from a depth, and that it is what the ladder's rules say."""

import importlib
import math
import pickle
import random

import pytest

from paxlite.config.attributes import read
from paxlite.core.errors import UserError
from paxlite.ladder import transfer
from paxlite.ladder.sizes import Size
from paxlite.recipes import Chat
from paxlite.recipes.dial import ChatByDepth
from tests.support import runs

ONE = {'ICI_MESH_SHAPE': [1, 1, 1], 'DCN_MESH_SHAPE': [1, 1, 1]}
DEPTHS = [1, 2, 3, 4, 6, 9, 12, 20, 26]


@pytest.mark.parametrize('depth', [0, -1, 65, '4', 4.0, True, None])
def test_a_depth_that_cannot_be_is_refused_in_a_line(depth):
  with pytest.raises(UserError, match='the depth is a whole number from 1 to 64') as e:
    Chat(depth=depth)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('text', ['0', '-3'])
def test_an_attribute_that_cannot_be_is_refused(text):
  with pytest.raises(UserError, match='DEPTH'):
    ChatByDepth(DEPTH=int(text), **ONE).validate()


@pytest.mark.parametrize('text', ['four', '2.5'])
def test_a_depth_of_a_command_line_is_a_whole_number(text):
  with pytest.raises(ValueError, match=text):
    read(text, int)


def test_a_class_is_found_by_its_name():
  cls = Chat(depth=7)
  assert cls is Chat(7) is importlib.import_module(cls.__module__).Chat7
  assert pickle.loads(pickle.dumps(cls)) is cls
  with pytest.raises(AttributeError):
    importlib.import_module(cls.__module__).Chat0  # noqa: B018


@pytest.mark.parametrize('depth', DEPTHS)
def test_a_depth_decides_all_sizes(depth):
  e = Chat(depth=depth)(**ONE)
  e.validate()
  assert (depth, 64 * depth, 64) == (e.NUM_LAYERS, e.MODEL_DIMS, e.DIMS_PER_HEAD)
  assert e.VOCAB_SIZE in {4096, 8192, 16384, 32768}
  tokens = e.MAX_STEPS * e.batch_size * e.MAX_SEQ_LEN
  assert tokens == pytest.approx(e.TRAIN_TOKENS, rel=1e-3)
  assert e.MAX_STEPS >= 1000


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=4)
@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
@pytest.mark.parametrize('depth', [2, 3, 6, 12])
def test_values_are_those_of_the_ladder(depth, optimizer):
  """From the model of one layer and 256 dimensions, for which the values of MuonRecipe are."""
  sizes = {'NUM_LAYERS': 1, 'MODEL_DIMS': 256, 'NUM_HEADS': 4, 'OPTIMIZER': optimizer}
  e = Chat(depth=depth)(OPTIMIZER=optimizer, **ONE)
  base = e.replaced(**sizes, VOCAB_SIZE=e.VOCAB_SIZE, WEIGHT_DECAY=e.WEIGHT_DECAY)
  found = transfer.values_of(base, Size(e.MODEL_DIMS, depth), Size(256, 1))
  ours = {name: getattr(e, name) for name in found}
  for name, value in found.items():
    expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
    assert ours[name] == expected, name


def test_values_follow_those_that_are_stated():
  draw = random.Random(3)
  for _ in range(20):
    depth, tokens = draw.randint(1, 12), draw.randint(10**5, 10**10)
    e = Chat(depth=depth)(TRAIN_TOKENS=tokens, **ONE)
    assert e.MAX_STEPS * e.batch_size * e.MAX_SEQ_LEN == pytest.approx(tokens, rel=0.02)
    twice = e.replaced(PERCORE_BATCH_SIZE=2 * e.PERCORE_BATCH_SIZE)
    assert pytest.approx(e.MAX_STEPS / 2, abs=1) == twice.MAX_STEPS
    # the same decay of the weights in all steps together
    assert pytest.approx(e.WEIGHT_DECAY * e.MAX_STEPS) == twice.WEIGHT_DECAY * twice.MAX_STEPS


def test_a_mesh_changes_no_batch():
  one, eight = Chat(depth=6)(**ONE), Chat(depth=6)(**ONE | {'ICI_MESH_SHAPE': [1, 8, 1]})
  assert (one.batch_size, one.MAX_STEPS) == (eight.batch_size, eight.MAX_STEPS)


@pytest.mark.parametrize('mesh', [[1, 3, 1], [2, 3, 1], [1, 24, 1], [1, 512, 1]])
@pytest.mark.parametrize('length', [100, 256])
def test_each_device_has_whole_sequences(mesh, length):
  """Machines have 3, 6 or 24 devices, too, and a sequence any length."""
  e = Chat(depth=4)(**ONE | {'ICI_MESH_SHAPE': mesh}, MAX_SEQ_LEN=length)
  e.validate()
  one = Chat(depth=4)(**ONE)
  tokens = max(one.batch_size * one.MAX_SEQ_LEN, math.prod(mesh) * length)
  assert e.batch_size * length == pytest.approx(tokens, rel=0.3)


def test_a_run_that_learns_nothing_has_no_weight_decay():
  e = Chat(depth=4)(LEARNING_RATE=0.0, **ONE)
  e.validate()
  assert e.WEIGHT_DECAY == 0


@pytest.mark.slow
def test_one_repeated_layer_compiles_on_eight_devices():
  """XLA refused its own all-to-all of a single matrix, which Muon spreads over the devices."""
  values = 'DEPTH=1', 'VOCAB_SIZE=512', 'MAX_SEQ_LEN=64', 'FPROP_DTYPE=float32'
  experiment = 'paxlite.recipes.bundled.chat_d20.D20Text'
  runs.module('paxlite', 'compile', experiment, '--target=here', *values, devices=8)
