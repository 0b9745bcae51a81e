"""A plan is calibrated by what a run has measured of its steps."""

import dataclasses
import json
import pathlib

import pytest

from paxlite.aot import step_parts, targets
from paxlite.aot.planning import prices
from paxlite.aot.planning.machine import of_target
from paxlite.aot.roofline import Links, costs_of
from paxlite.aot.step_calibration import FILE, StepCalibration
from paxlite.core.errors import UserError
from paxlite.tools import plan as tool
from paxlite.tools.report_page import forecasts

PROGRAMS = pathlib.Path(__file__).parent / 'programs'
MEASURED = StepCalibration(
  'h100', 'NVIDIA H100 80GB HBM3', 1.25, (1.2, 1.5), 39, 'TinyGPT', {'NUM_LAYERS': 2, 'rows': 8},
  {'jax': '0.0.1', 'no-such-package': '1'},
)  # fmt: skip
LINKS = Links({'data': 8}, {'data': 8})


@pytest.fixture
def folder(tmp_path):
  """The folder of a run that has measured its steps."""
  (tmp_path / FILE).write_text(MEASURED.text())
  return tmp_path


def changed(folder, **values):
  found = json.loads(MEASURED.text())
  (folder / FILE).write_text(json.dumps({**found, **values}))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('name', ['gpu_gathered_scan', 'gpu_attention'])
def test_each_second_of_a_step_is_multiplied(folder, name):
  text = (PROGRAMS / f'{name}.hlo').read_text()
  sheet = targets.parse('h100x8').chip
  chip = targets.parse('h100x8', str(folder)).chip
  before, after = (costs_of(text, 'gpu', LINKS, c) for c in (sheet, chip))
  assert after.roofline.step == pytest.approx(1.25 * before.roofline.step)
  for part, seconds in before.kernel_seconds.items():
    assert after.kernel_seconds[part] == pytest.approx(1.25 * seconds)
  assert after.roofline.exposed == pytest.approx(1.25 * before.roofline.exposed)
  assert after.roofline.least == before.roofline.least, 'it is that of the data sheet'


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize('name', ['gpu_matmul', 'gpu_fp8', 'gpu_gathered_scan', 'gpu_attention'])
def test_the_parts_of_a_step_are_its_kernels(name):
  text = (PROGRAMS / f'{name}.hlo').read_text()
  costs = costs_of(text, 'gpu', LINKS, targets.parse('h100x8').chip)
  whole = costs.roofline.compute_bound + costs.roofline.memory_bound
  assert sum(costs.kernel_seconds.values()) == pytest.approx(whole)
  assert step_parts.OPTIMIZER not in costs.kernel_seconds, 'none of them trains'
  assert (step_parts.ATTENTION in costs.kernel_seconds) == (name == 'gpu_attention')


def test_the_report_names_each_part():
  assert tuple(forecasts.KERNELS) == step_parts.PARTS


def test_estimates_are_multiplied_too_and_keep_their_verdicts_apart(folder):
  sheet, machine = (of_target(targets.parse('h100x8', c)) for c in (None, str(folder)))
  for name in ('bandwidth', 'ici', 'dcn', 'host'):
    assert getattr(machine, name) == getattr(sheet, name) / 1.25
  assert machine.flops == {dtype: flops / 1.25 for dtype, flops in sheet.flops.items()}
  assert machine.identity != sheet.identity
  elsewhere = dataclasses.replace(machine, calibration='in another folder')
  assert machine.identity == elsewhere.identity


def test_the_sentence_says_what_the_ratio_rests_on(folder):
  sentence = of_target(targets.parse('h100x8', str(folder / FILE))).calibration
  assert sentence.startswith(
    'Seconds of h100 are multiplied by 1.25, as measured over 39 steps (half of them between 1.2 '
    'and 1.5) of TinyGPT (NUM_LAYERS 2, rows 8), in '
  )
  assert 'It was measured with jax 0.0.1, and now' in sentence
  assert 'no-such-package' not in sentence


@pytest.mark.cases(fast=7)
@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'chip': 'v5e'}, 'is of v5e, and the target of h100'),
    ({'measured_over_foreseen': 0}, 'measured_over_foreseen=0 must be a number above 0'),
    ({'measured_over_foreseen': 'x'}, "measured_over_foreseen='x' must be a number above 0"),
    ({'quartiles': [1]}, r'quartiles=\[1\] must be two numbers'),
    ({'steps': 0}, 'steps=0 must be a whole number of at least 1'),
    ({'shape': {'rows': 'x'}}, 'shape=.* must be an object of whole numbers'),
    ({'versions': 3}, 'versions=3 must be an object'),
  ],
)
def test_a_bad_file_is_refused(folder, values, message):
  changed(folder, **values)
  with pytest.raises(UserError, match=f'--calibration={folder}:? {message}'):
    targets.parse('h100x8', str(folder))


def test_a_run_without_measured_steps_is_refused(tmp_path):
  with pytest.raises(UserError, match=f'{tmp_path} has no calibration.json: a run writes it after'):
    targets.parse('h100x8', str(tmp_path))


def test_nothing_is_foreseen_here(folder):
  with pytest.raises(UserError, match='--calibration is for machines that are not here'):
    targets.parse('here', str(folder))
  with pytest.raises(UserError, match='--calibration is for machines that are not here'):
    tool.main(['TinyGPT', '--target=here', f'--calibration={folder}'])


def test_machines_with_the_chip_are_calibrated(folder):
  names = ['v5e-8', 'h100x8', 'h100x16']
  assert prices.calibrated(names, str(folder)) == ['h100x8', 'h100x16']
  assert prices.calibrated(names, None) == []
  with pytest.raises(UserError, match='is of h100, and no machine in --prices has it'):
    prices.calibrated(['v5e-8'], str(folder))
