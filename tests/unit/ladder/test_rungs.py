import pathlib

import pytest

from paxlite.experiments.demo import DemoGPT, DemoGPTAdam
from paxlite.ladder import rungs, transfer
from paxlite.ladder.sizes import Size
from paxlite.programs.launch import build_experiment


@pytest.mark.parametrize('kind', [DemoGPT, DemoGPTAdam])
@pytest.mark.parametrize('size', ['96x3', '256x3', '64x4'])
def test_the_values_that_are_needed_make_the_same_experiment(kind, size):
  """SOFTMAX_INIT_STD derives from INIT_STD, which changes, and must stay as it was."""
  e = kind(NUM_HEADS=16)
  values = transfer.values_of(e, Size.parsed(size), Size(256, 1))
  needed = rungs.needed(e, values)
  assert e.replaced(**needed).values() == e.replaced(**values).values()
  assert ('SOFTMAX_INIT_STD' in needed) == ('INIT_STD' in needed)
  assert len(needed) < len(values)


def test_words_are_read_as_the_values_that_they_state():
  of = [Size(24, 1), Size(48, 2)]
  e = DemoGPT(NUM_HEADS=14, MODEL_DIMS=336)
  given = {'NUM_HEADS': '14', 'MODEL_DIMS': '336'}
  made = rungs.rungs('DemoGPT', given, e, of, Size(336, 1), [0.5, 1], 2, pathlib.Path('x y'))
  assert [r.folder.name for r in made[:4]] == [
    '24x1_rate0.5_seed1234', '24x1_rate0.5_seed1235', '24x1_seed1234', '24x1_seed1235',
  ]  # fmt: skip
  for rung in made:
    stated = dict(word.split('=', 1) for word in rung.words)
    assert build_experiment('DemoGPT', [], stated).values() == rung.experiment.values()
  assert "'--folder=x y/24x1_rate0.5_seed1234'" in made[0].command
