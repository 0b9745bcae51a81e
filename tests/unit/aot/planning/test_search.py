"""Checks the search around its estimates: what is kept, printed, refused and interrupted."""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys

import jax
import pytest

from paxlite.aot import chips, targets
from paxlite.aot.planning import impossible, report
from paxlite.aot.planning.candidates import Candidate, Space
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.layouts import Layout
from paxlite.aot.planning.machine import Machine, of_target
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.search import Judged, Plan, Point, Search, pareto
from paxlite.aot.planning.store import Folder, Store, Verdict, place_at
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.gemma4 import Gemma4E2B
from paxlite.experiments.llama import LLaMA70B
from paxlite.experiments.registry import build_experiment
from paxlite.tools import plan as tool
from tests.support import runs
from tests.support.gcs_server import gcs_server

HOST = Machine('here', 'cpu', 8, 8, 1e9, {'': 1e12}, 1e11, 1e10, 1e9)
LAYOUT = Layout(('replica', 'data', 'mdl', 'context'), (1, 4, 1, 2), (1, 1, 1, 1))
VALUES = {'CHECKPOINT_POLICY': 'SAVE_OUT_PROJ', 'NUM_LOSS_CHUNKS': 4, 'USE_REPEATED_LAYER': True}


def test_a_store_keeps_verdicts_of_the_same_question(tmp_path):
  verdict = Verdict(1e9, 0.5, 'memory traffic', (0.25, 0.5), {'collectives': 0.1}, spent=3.0)
  store = Store(Folder(tmp_path), {'versions': 1})
  store.put({'NUM_LAYERS': 2}, verdict)
  assert Store(Folder(tmp_path), {'versions': 1}).get({'NUM_LAYERS': 2}) == verdict
  assert store.get({'NUM_LAYERS': 3}) is None
  assert Store(Folder(tmp_path), {'versions': 2}).get({'NUM_LAYERS': 2}) is None
  for content in (b'', b'{"memory": 1}', b'no JSON'):
    next(tmp_path.glob('*.json')).write_bytes(content)
    assert store.get({'NUM_LAYERS': 2}) is None


def test_people_share_verdicts_in_a_bucket(monkeypatch):
  verdict = Verdict(1e9, 0.5, 'memory traffic', (0.25, 0.5), {'collectives': 0.1}, spent=3.0)
  with gcs_server('bkt') as gcs:
    for name, value in gcs.environment().items():
      monkeypatch.setenv(name, value)
    Store(place_at('gs://bkt/plans'), {'versions': 1}).put({'NUM_LAYERS': 2}, verdict)
    found = Store(place_at('gs://bkt/plans'), {'versions': 1})
    assert found.get({'NUM_LAYERS': 2}) == verdict
    assert found.get({'NUM_LAYERS': 3}) is None
    gcs.objects['bkt'].clear()
    assert found.get({'NUM_LAYERS': 2}) is None
    with pytest.raises(UserError, match='gs://none: there is no bucket none'):
      place_at('gs://none/plans')


def test_a_verdict_decides_about_the_memory():
  verdict = Verdict(memory=100.0, seconds=1.0)
  assert verdict.fits(100)
  assert not verdict.fits(99)
  assert not Verdict(memory=100.0).fits(200), 'the compiler refused it'
  assert not dataclasses.replace(verdict, error='x').fits(200)


def test_the_front():
  """A point that another beats in memory and time is left out."""
  point = lambda memory, seconds: Point(Candidate(LAYOUT, 8, 1, {}), memory, seconds, True)
  front = pareto([point(3, 1), point(1, 3), point(2, 2), point(2, 4), point(4, 1), point(5, 0.5)])
  assert [(p.memory, p.row_seconds) for p in front] == [(1, 3), (2, 2), (3, 1), (5, 0.5)]


def test_the_command_makes_the_candidate():
  """The printed flags, read as a shell and paxlite read them, give the candidate's attributes."""
  experiment = build_experiment('TinyGPT', [], {'NUM_LAYERS': '4', 'MAX_SEQ_LEN': '64'})
  machine = dataclasses.replace(HOST, share=0.92)
  candidate = Candidate(LAYOUT, 4, 1, VALUES)
  judged = Judged(
    candidate, Estimate(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), Verdict(1.0, 1.0), 1.0, fits=True
  )
  text = report.command(Plan(Space(experiment, machine)), judged, 'TinyGPT', {'NUM_LAYERS': '4'})
  words = shlex.split(text)
  assert words[:4] == ['XLA_PYTHON_CLIENT_MEM_FRACTION=0.92', 'paxlite', 'train', 'TinyGPT']
  made = build_experiment('TinyGPT', [], dict(w.split('=', 1) for w in words[4:]))
  assert made.values() == candidate.of(experiment).values()
  assert made.batch_size == 4


def test_the_page_of_a_search_that_was_interrupted_at_once():
  page = report.page(Plan(Space(TinyGPT(), HOST), considered=2, interrupted=True), 'TinyGPT', {})
  assert page.startswith('TinyGPT on here: no candidate fits so far')
  assert page.endswith('the same command continues from here')


def test_the_page_says_what_is_on_the_host():
  verdict = Verdict(1.0, 1.0, host=2**30, note='Not all is counted.')
  judged = Judged(Candidate(LAYOUT, 4, 1, VALUES), Estimate(*[1.0] * 8), verdict, 1.0, fits=True)
  page = report.page(Plan(Space(TinyGPT(), HOST), judged=[judged]), 'TinyGPT', {})
  assert ', and 1.00 GiB of its host\n' in page
  assert '\n   Not all is counted.\n' in page


@pytest.mark.parametrize(('seconds', 'first'), [(0.998, 'devices'), (0.99, 'host')])
def test_the_host_is_used_only_if_it_is_worth_it(seconds, first):
  def judged(seconds, on_host):
    one = Candidate(LAYOUT, 4, 1, VALUES | {'OFFLOAD_OPTIMIZER': on_host})
    return Judged(one, Estimate(*[1.0] * 8), Verdict(1.0, seconds), 1.0, fits=True)

  plan = Plan(Space(TinyGPT(), HOST), judged=[judged(seconds, True), judged(1.0, False)])
  assert plan.best[0].candidate.values['OFFLOAD_OPTIMIZER'] is (first == 'host')


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('memory', [1e9, 1e3], ids=['it fits', 'it does not fit'])
def test_what_is_on_the_host_is_also_judged_without(tmp_path, memory):
  layout = Layout(('replica', 'data', 'mdl'), (1, 8, 1), (1, 1, 1))
  experiment = TinyGPT(ICI_MESH_SHAPE=[1, 8, 1])
  plain = VALUES | {'OFFLOAD_OPTIMIZER': False, 'OFFLOAD_ACTIVATIONS': ()}
  offloaded = plain | {'OFFLOAD_OPTIMIZER': True}
  machine = dataclasses.replace(HOST, memory=memory, host=1e9)
  kept = frozenset({'MESH_AXES', 'ICI_MESH_SHAPE', 'DCN_MESH_SHAPE', 'NUM_MICROBATCHES'})
  space = Space(experiment, machine, kept, frozenset(), 8, (offloaded, plain))

  class Pool:
    def judge(self, questions):
      return ((i, Verdict(990.0, 1.0)) for i in range(len(questions)))

  estimator = Estimator(Model(experiment, jax.devices()[0]), machine)
  search = Search(space, estimator, Pool(), Store(Folder(tmp_path), {}), 1, 1, lambda _: None)
  search._estimate()
  first = Candidate(layout, 8, 1, offloaded)
  i = search._candidates.index(first)
  search._valid[i] = first.of(experiment)
  search._ask([i], 0.0)
  search._judge_on_devices(0.0)
  judged = [j.candidate.values for j in search.plan.judged]
  assert judged == ([offloaded, plain] if memory > 1e6 else [offloaded])


def test_the_page_says_that_data_is_missing():
  judged = Judged(
    Candidate(LAYOUT, 4, 1, VALUES), Estimate(*[1.0] * 8), Verdict(1.0, 1.0), 1.0, fits=True
  )
  page = lambda e: report.page(Plan(Space(e, HOST), judged=[judged]), 'X', {})
  assert 'Before you train' not in page(TinyGPT())
  assert 'Before you train: LLaMA70B has no dataset' in page(LLaMA70B())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_would_fit_is_named():
  """TinyGPT is put on devices whose memory is too small for it."""
  experiment = TinyGPT(MAX_SEQ_LEN=256, NUM_LAYERS=1, NUM_HEADS=1, HIDDEN_DIMS=33)
  machine = dataclasses.replace(of_target(targets.parse('h100x4')), memory=5e6)
  model = Model(experiment, jax.devices()[0])
  space = Space(experiment, machine)
  text = impossible.message(space, Estimator(model, machine), jax.devices()[0])
  assert text.startswith('TinyGPT does not fit 4 × h100: the leanest way (')
  assert text.endswith('MiB. What would fit: --target=h100x8; or --seq_len=128')


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_what_does():
  """LLaMA 70B has 1.1 TB of state: 8 H100 cannot hold it, 16 can, and one can hold LoRA's."""
  machine = of_target(targets.parse('h100x8'))
  device = jax.devices()[0]
  experiment = LLaMA70B().replaced(ICI_MESH_SHAPE=[1, 8, 1], DCN_MESH_SHAPE=[1, 1, 1])
  space = Space(experiment, machine)
  estimator = Estimator(Model(experiment, device), machine)
  on_devices = impossible.without_host(space)
  text = impossible.message(on_devices, estimator, device)
  assert text.startswith('LLaMA70B does not fit 8 × h100: its parameters, moments and counters')
  assert ' of 72.77 GiB on each device, in any layout' in text
  assert '--target=h100x16; or LoRA' in text
  assert text.endswith('; or host offload (OFFLOAD_OPTIMIZER=True)')

  lean = impossible.leanest(space, estimator)
  assert lean[0].values['OFFLOAD_OPTIMIZER'], 'the search finds what the message names'
  assert lean[1].memory < machine.memory
  offloaded = Judged(lean[0], lean[1], Verdict(1.0, 1.0), 1.0, fits=True)
  found = Plan(space, judged=[offloaded])
  assert tool.only_on_host(found, space, estimator, device) == text
  plain = Judged(*impossible.leanest(on_devices, estimator), Verdict(1.0, 1.0), 1.0, fits=True)
  assert tool.only_on_host(Plan(space, judged=[plain]), space, estimator, device) is None


@pytest.mark.slow
def test_a_state_that_is_too_large_is_an_answer():
  """Nothing is compiled; the answer says so, in JSON too, and the command exits with 1."""
  machine = dataclasses.replace(HOST, memory=1e4)
  args = argparse.Namespace(fdl_config='TinyGPT', fiddler=[], most=1)
  answer = tool.searched(Space(TinyGPT(), machine), args, {}, pool=None, workers=1, answers=None)
  assert not answer['fits']
  assert not answer['interrupted']
  assert 'its parameters, moments and counters alone need' in answer['page']
  assert answer['json']['best'] == answer['json']['judged'] == []


def test_what_is_not_counted_is_refused():
  tpu = of_target(targets.parse('v5e-8'))
  with pytest.raises(UserError, match=r'a v5e and its host is not known\. Write it as host_b'):
    impossible.check_counted(TinyGPT(OFFLOAD_OPTIMIZER=True), tpu)
  with pytest.raises(UserError, match='NUM_KEY_READERS=20: plans are for stacks that repeat'):
    impossible.check_counted(Gemma4E2B(), tpu)
  impossible.check_counted(TinyGPT(OFFLOAD_OPTIMIZER=True), of_target(targets.parse('h100x8')))
  impossible.check_counted(
    TinyGPT(OFFLOAD_OPTIMIZER=True), dataclasses.replace(HOST, measured=True)
  )


def test_a_batch_that_cannot_be_split_is_named_with_the_nearest():
  experiment = TinyGPT(NUM_HEADS=1, HIDDEN_DIMS=33)
  space = Space(experiment, HOST, frozenset({'NUM_MICROBATCHES'}), global_batch=7)
  text = impossible.message(space, Estimator(Model(experiment, jax.devices()[0]), HOST), None)
  assert text.endswith('for a global batch of 7 rows: the nearest is --global_batch=8')


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--global_batch=0', '--global_batch=0 must be at least 1'),
    ('--keep=NUM_LAYERS', '--keep=NUM_LAYERS: the planner chooses MESH_AXES'),
    ('--try=USE_TE', '--try=USE_TE: the planner chooses MESH_AXES'),
    ('--json=/nowhere/plan.json', '--json=/nowhere/plan.json: there is no such folder'),
    ('NUM_LAYER=3', 'TinyGPT has no attribute NUM_LAYER'),
  ],
)
def test_wrong_input(argument, message):
  with pytest.raises(UserError, match=message):
    tool.main(['TinyGPT', '--target=here', argument])


class OtherModel(Experiment):
  """An experiment without a language model."""


def test_an_experiment_without_a_language_model_is_refused():
  with pytest.raises(
    UserError, match='OtherModel is not a language model, and paxlite plan takes only'
  ):
    tool.main([f'{__name__}.OtherModel', '--target=v5e-8'])


def test_measured_speeds_replace_those_of_the_data_sheet(tmp_path):
  path = tmp_path / 'speeds.json'
  flops = {'bf16': 7e14, 'f32': 3e14}
  speeds = dict(chip='h100', flops=flops, memory_bandwidth=3e12, host_bandwidth=5e10)
  path.write_text(json.dumps(speeds))
  chip = targets.parse('h100x8', str(path)).chip
  sheet = chips.CHIPS['h100']
  assert chip.flops_by_type[''] == 7e14
  assert chip.flops_by_type['f32'] == 3e14
  assert chip.flops_by_type['f8e4m3fn'] == sheet.flops_by_type['f8e4m3fn']
  assert (chip.memory_bandwidth, chip.ici_bandwidth) == (3e12, sheet.ici_bandwidth)
  assert of_target(targets.parse('h100x8', str(path))).host == 5e10
  # kernels reach a little less than a large multiplication and a copy; what was not measured, and
  # attention, is counted by the data sheet
  rates = sheet.rates
  assert chip.reached_flops[''] == pytest.approx(7e14 * rates.matmul / rates.large_matmul)
  assert chip.reached_flops['f8e4m3fn'] == pytest.approx(rates.matmul * 1979e12)
  assert chip.reached_bandwidth == pytest.approx(3e12 * rates.memory / rates.copy)
  assert chip.sheet_flops == sheet.flops_by_type
  for wrong in ({'chip': 'v5e'}, {'flop': 1}, {'memory_bandwidth': -1}, {'flops': {'bf16': 'x'}}):
    path.write_text(json.dumps({**speeds, **wrong}))
    with pytest.raises(UserError, match=f'--calibration={path}'):
      targets.parse('h100x8', str(path))


def planned(folder, *flags: str, most: int = 3) -> subprocess.Popen[str]:
  command = [sys.executable, '-m', 'paxlite', 'plan', 'TinyGPT', '--target=here']
  command += ['--keep', 'NUM_MICROBATCHES', 'PERCORE_BATCH_SIZE', f'--most={most}', *flags]
  environment = runs.environment(devices=2) | {'XDG_CACHE_HOME': str(folder)}
  return subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
  )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_are_run_here_and_kept(tmp_path):
  """The second time, nothing is run; Ctrl-C prints the best so far."""
  first, second = tmp_path / 'first.json', tmp_path / 'second.json'
  for path in (first, second):
    process = planned(tmp_path, f'--json={path}')
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert 'paxlite train TinyGPT' in out
  found = json.loads(first.read_text())
  assert len(found['judged']) == 3
  assert all(j['seconds'] > 0 and j['memory'] > 0 for j in found['judged'])
  assert found['best'][0]['seconds'] == min(j['seconds'] for j in found['judged'])
  assert json.loads(second.read_text()) == found

  process = planned(tmp_path, most=30)
  assert process.stdout is not None
  lines = []
  for line in process.stdout:
    lines.append(line)
    if line.startswith('[4 of'):
      os.kill(process.pid, signal.SIGINT)
      break
  out = process.stdout.read()
  assert process.wait(timeout=60) == 130
  assert 'paxlite train TinyGPT' in out
  assert 'Interrupted: this is the best so far' in out
