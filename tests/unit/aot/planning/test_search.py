"""Checks the search around its estimates: what is kept, printed, refused and interrupted."""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

import jax
import pytest

from paxlite.aot import chips, targets
from paxlite.aot.commands import plan as tool
from paxlite.aot.planning import pages, ways_out
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.machine import of_target
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.search import Judged, Plan, Search
from paxlite.aot.planning.space import Candidate, Layout, Space
from paxlite.aot.planning.verdicts import Store, Verdict, code_of
from paxlite.aot.planning.workers import WorkerPool
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.llama import LLaMA70B
from paxlite.programs.launch import build_experiment
from tests.support import runs
from tests.unit.aot.planning.machines import machine

HOST = machine()
LAYOUT = Layout(('replica', 'data', 'mdl', 'context'), (1, 4, 1, 2), (1, 1, 1, 1))
VALUES = {'CHECKPOINT_POLICY': 'SAVE_OUT_PROJ', 'NUM_LOSS_CHUNKS': 4, 'USE_REPEATED_LAYER': True}


ARGS = argparse.Namespace(fdl_config='TinyGPT', attributes={}, fiddler=[], most=1)


def judged(seconds=1.0, memory=1.0, fits=True, **about) -> Judged:
  """Returns a candidate with a verdict."""
  verdict = Verdict(memory, seconds, **about)
  return Judged(Candidate(LAYOUT, 4, 1, VALUES), Estimate(1.0, 1.0, 1.0), verdict, fits)


def test_a_store_keeps_verdicts_of_the_same_question(tmp_path):
  verdict = Verdict(1e9, 0.5, 'memory traffic', host=2.0)
  store = Store({'versions': 1}, tmp_path)
  store.write({'NUM_LAYERS': 2}, verdict)
  assert Store({'versions': 1}, tmp_path).get({'NUM_LAYERS': 2}) == verdict
  assert store.get({'NUM_LAYERS': 3}) is None
  assert Store({'versions': 2}, tmp_path).get({'NUM_LAYERS': 2}) is None
  for content in (b'', b'{"mfu": 1}', b'no JSON'):
    next(tmp_path.glob('*.json')).write_bytes(content)
    assert store.get({'NUM_LAYERS': 2}) is None


def test_what_is_known_of_a_class_is_not_said_of_another():
  class Plain(TinyGPT):
    pass

  class Other(TinyGPT):
    def task(self):
      cfg = super().task()
      cfg.losses = {**cfg.losses, 'more': cfg.losses['avg_xent']}
      return cfg

  assert Plain().values() == Other().values()
  assert code_of(Plain()) == code_of(TinyGPT()) != code_of(Other())


def test_a_verdict_decides_about_the_memory():
  verdict = Verdict(memory=100.0, seconds=1.0)
  assert verdict.fits(100)
  assert not verdict.fits(99)
  assert not Verdict(memory=100.0).fits(200), 'the compiler refused it'
  assert not verdict._replace(error='x').fits(200)


def test_the_command_makes_the_candidate():
  """The printed flags, read as a shell and paxlite read them, give the candidate's attributes."""
  experiment = build_experiment('TinyGPT', [], {'NUM_LAYERS': '4', 'MAX_SEQ_LEN': '64'})
  where = machine('h100x8', 'gpu')
  candidate = Candidate(LAYOUT, 4, 1, VALUES)
  args = argparse.Namespace(**vars(ARGS) | {'attributes': {'NUM_LAYERS': '4', 'MAX_SEQ_LEN': '64'}})
  words = shlex.split(pages.command(Plan(Space(experiment, where)), judged(), args))
  assert words[:4] == ['XLA_PYTHON_CLIENT_MEM_FRACTION=0.92', 'paxlite', 'train', 'TinyGPT']
  made = build_experiment('TinyGPT', [], dict(w.split('=', 1) for w in words[4:]))
  assert made.values() == candidate.of(experiment).values()
  assert made.batch_size == 4


def test_the_page_of_a_search_that_was_interrupted_at_once():
  page = pages.page(Plan(Space(TinyGPT(), HOST), considered=2, interrupted=True), ARGS)
  assert page.startswith('TinyGPT on here: of 2 candidates, 0 were measured, 0 fit')
  assert page.endswith('the same command continues from here')


def test_the_page_lists_what_fits_with_the_fastest_first():
  found = [judged(2.0, 3 * 2**30), judged(5.0, fits=False), judged(1.0, 2**30, host=2**31)]
  found += [judged(0.0, 0.0, fits=False, error='it failed')]
  plan = Plan(Space(TinyGPT(MAX_SEQ_LEN=64), HOST), considered=9, judged=found)
  lines = pages.page(plan, ARGS).splitlines()
  assert lines[0] == 'TinyGPT on here: of 9 candidates, 4 were measured, 2 fit, 1 failed'
  assert lines[2].split()[:2] == ['s', 'a']
  fast, slow = (line.split() for line in lines[3:5])
  assert fast[:9] == ['1', '32', '1.00', 'GiB', '+', '2.00', 'GiB', 'of', 'the']
  assert slow[:4] == ['2', '16', '3.00', 'GiB']
  assert lines[7] == '  ' + pages.command(plan, found[2], ARGS)
  as_json = pages.as_json(plan, ARGS)
  assert [j['seconds'] for j in as_json] == [1.0, 2.0, 5.0, 0.0]
  assert [j['fits'] for j in as_json] == [True, True, False, False]
  assert as_json[0]['command'] == lines[7].strip()
  json.dumps(as_json)


class Estimates:
  """Estimates by the rows of a candidate, or by its values."""

  def __init__(self, of):
    self.of = of

  def estimate(self, candidate):
    return Estimate(*self.of(candidate), 0.0)


class Pool:
  """Says of each experiment what a function says; keeps in which order it was asked."""

  size = 1

  def __init__(self, of):
    self.of, self.asked = of, []

  def judge(self, questions):
    for i, (_, values, _) in enumerate(questions):
      self.asked.append(values)
      yield i, Verdict(*self.of(values))


def searched(folder, estimates, verdicts, values=None, most=24, **about):
  """Searches batches of one mesh, with these values."""
  experiment = TinyGPT(ICI_MESH_SHAPE=[1, 8, 1])
  kept = frozenset({'MESH_AXES', 'ICI_MESH_SHAPE', 'DCN_MESH_SHAPE', 'NUM_MICROBATCHES'})
  pool = Pool(verdicts)
  space = Space(experiment, machine('h100x8', 'gpu', **about), kept, values=values or (VALUES,))
  store = Store({'about': str(about)}, folder)
  search = Search(space, Estimates(estimates), pool, store, most, lambda _: None)
  return search.run(), pool


ROWS = [8 * 2**i for i in range(7)]


def test_the_fastest_by_its_estimate_is_judged_first(tmp_path):
  """Larger batches are estimated to be faster, and the best one is that with the best verdict."""
  row_seconds = dict(zip(ROWS, (7, 6, 5, 4, 3, 1, 2), strict=True))
  rows = lambda values: values['PERCORE_BATCH_SIZE'] * 8
  of = lambda values: (1.0, rows(values) * row_seconds[rows(values)])
  plan, pool = searched(tmp_path, lambda c: (1.0, 1.0), of, most=3)
  assert [rows(values) for values in pool.asked] == ROWS[:3:-1]
  assert plan.best[0].candidate.rows == ROWS[-2]
  again, pool = searched(tmp_path, lambda c: (1.0, 1.0), of, most=3)
  assert pool.asked == [], 'what was judged is kept'
  assert [j.candidate for j in again.judged] == [j.candidate for j in plan.judged]


def test_verdicts_correct_the_estimates_of_memory(tmp_path):
  """All need twice of what is estimated: after the first one, those that cannot fit are left."""
  estimates = lambda c: (c.rows * 1e6, 1.0)
  of = lambda values: (2 * values['PERCORE_BATCH_SIZE'] * 8e6, 1.0)
  plan, _ = searched(tmp_path, estimates, of, memory=140e6)
  assert [j.candidate.rows for j in plan.judged] == [128, 64, 32, 16, 8, 256, 512]
  assert plan.best[0].candidate.rows == 64


def test_candidates_with_the_same_mesh_and_policy_do_not_all_come_at_once(tmp_path):
  """After three of them, one that is estimated to be slower by 5 % is more worth a verdict."""
  lean = VALUES | {'CHECKPOINT_POLICY': 'SAVE_NOTHING'}
  estimates = lambda c: (1.0, c.rows * (1.05 if c.values == lean else 1.0))
  of = lambda values: (1.0, values['PERCORE_BATCH_SIZE'] * 8)
  plan, _ = searched(tmp_path, estimates, of, (VALUES, lean), most=4)
  policies = [j.candidate.values['CHECKPOINT_POLICY'] for j in plan.judged]
  assert policies == [VALUES['CHECKPOINT_POLICY']] * 3 + ['SAVE_NOTHING']


def test_policies_that_keep_the_same_are_judged_once(tmp_path):
  values = [VALUES | {'CHECKPOINT_POLICY': p} for p in ('SAVE_NOTHING', 'SAVE_ATTENTION')]
  of = lambda values: (1.0, values['PERCORE_BATCH_SIZE'])
  plan, _ = searched(tmp_path, lambda c: (1.0, c.rows), of, tuple(values))
  assert plan.considered == 2 * len(plan.judged) == 2 * len(ROWS)


class Executor:
  """Ends with all its questions at the one that kills a process, the first time with others."""

  def __init__(self):
    self.asked = 0

  def submit(self, function, name, values, memory):
    self.asked += 1
    found = futures.Future()
    if name == 'kills' or self.asked <= 3:
      found.set_exception(BrokenProcessPool())
    else:
      found.set_result(Verdict(memory, 1.0))
    return found


def test_a_process_that_ends_fails_its_own_candidate_alone():
  pool = WorkerPool('here', None, 2, {})
  pool._pool = Executor()
  verdicts = dict(pool.judge([('a', {}, 1.0), ('kills', {}, 2.0), ('b', {}, 3.0)]))
  assert [verdicts[i].memory for i in range(3)] == [1.0, 0.0, 3.0]
  assert 'out of memory' in verdicts[1].error


@pytest.mark.slow
def test_a_pool_goes_on_after_a_process_has_ended():
  with WorkerPool('here', None, 1, dict(os.environ)) as pool:
    with pytest.raises(BrokenProcessPool):
      pool._submit(os._exit, 1).result()
    assert pool._submit(os.getpid).result() != os.getpid()


def test_the_page_says_that_data_is_missing():
  page = lambda e: pages.page(Plan(Space(e, HOST), judged=[judged()]), ARGS)
  assert 'Before you train' not in page(TinyGPT())
  assert 'Before you train: LLaMA70B has no dataset' in page(LLaMA70B())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_would_fit_is_named():
  """TinyGPT is put on devices whose memory is too small for it."""
  experiment = TinyGPT(MAX_SEQ_LEN=256, NUM_LAYERS=1, NUM_HEADS=1, HIDDEN_DIMS=33)
  where = dataclasses.replace(of_target(targets.parse('h100x4')), memory=5e6)
  model = Model(experiment, jax.devices()[0])
  space = Space(experiment, where)
  text = ways_out.message(space, Estimator(model, where))
  assert text.startswith('TinyGPT does not fit 4 × h100: the leanest way (')
  assert text.endswith('MiB. What would fit: --target=h100x8; or MAX_SEQ_LEN=128')


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_what_does():
  """LLaMA 70B has 1.1 TB of state: 8 H100 cannot hold it, 16 can, and one can hold LoRA's."""
  where = of_target(targets.parse('h100x8'))
  device = jax.devices()[0]
  experiment = LLaMA70B().replaced(ICI_MESH_SHAPE=[1, 8, 1], DCN_MESH_SHAPE=[1, 1, 1])
  space = Space(experiment, where)
  estimator = Estimator(Model(experiment, device), where)
  text = ways_out.message(space, estimator)
  assert text.startswith('LLaMA70B does not fit 8 × h100: its parameters, moments and counters')
  assert ' of 72.8 GiB on each device, in any layout' in text
  assert '--target=h100x16; or LoRA' in text
  assert text.endswith('; or moments on the host (OFFLOAD_OPTIMIZER=True)')
  moved = experiment.replaced(OFFLOAD_OPTIMIZER=True)
  _, estimate = ways_out.leanest(Space(moved, where), Estimator(Model(moved, device), where))
  assert estimate.memory < where.memory


@pytest.mark.slow
def test_a_state_that_is_too_large_is_an_answer():
  """Nothing is compiled, and the page says why."""
  space = Space(TinyGPT(), machine(memory=1e4))
  plan, page = tool.searched(space, ARGS, pool=None, store=None)
  assert plan.best == plan.judged == []
  assert not plan.interrupted
  assert 'its parameters, moments and counters alone need' in page


def test_what_cannot_be_estimated_is_refused():
  with pytest.raises(
    UserError, match='NUM_KV_SHARED_LAYERS=20: plans support only stacks of repeated'
  ):
    tool.main(['Gemma4E2B', '--target=v5e-8'])


def test_a_batch_that_cannot_be_split_is_named_with_the_nearest():
  experiment = TinyGPT(NUM_HEADS=1, HIDDEN_DIMS=33)
  space = Space(experiment, HOST, frozenset({'NUM_MICROBATCHES'}), global_batch=7)
  text = ways_out.message(space, Estimator(Model(experiment, jax.devices()[0]), HOST))
  assert text.endswith('for a global batch of 7 rows: the nearest is --global_batch=8')


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('--global_batch=0', '--global_batch=0 must be at least 1'),
    ('--keep=NUM_LAYERS', '--keep=NUM_LAYERS: the planner chooses only MESH_AXES'),
    ('--json=/proc/plan.json', '--json=/proc/plan.json cannot be written'),
    ('NUM_LAYER=3', 'TinyGPT has no attribute NUM_LAYER'),
  ],
)
def test_wrong_input(argument, message):
  with pytest.raises(UserError, match=message):
    tool.main(['TinyGPT', '--target=here', argument])


class OtherModel(Experiment):
  """An experiment without a language model."""


def test_an_experiment_without_a_language_model_is_refused():
  with pytest.raises(UserError, match='OtherModel is not a language model, which plans need'):
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
  assert chip.host_bandwidth == 5e10
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
  assert len(found) == 3
  assert all(j['seconds'] > 0 and j['memory'] > 0 for j in found)
  assert found == sorted(found, key=lambda j: j['seconds'])
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
