"""Expert parallelism in plans: what it is estimated to take, and that it is compared with FSDP."""

import argparse

import jax
import pytest

from paxlite.aot import targets
from paxlite.aot.planning import pages
from paxlite.aot.planning.estimate import Estimate, Estimator, Step
from paxlite.aot.planning.machine import of_target
from paxlite.aot.planning.model import Model
from paxlite.aot.planning.search import Search
from paxlite.aot.planning.space import Candidate, Layout, Space
from paxlite.aot.planning.verdicts import Verdict
from paxlite.experiments.qwen import Qwen3_30B_A3B

AXES = ('replica', 'data', 'mdl')
FSDP = Layout(AXES, (1, 64, 1), (1, 1, 1))
SPLIT = Layout((*AXES, 'expert'), (1, 16, 1, 4), (1, 1, 1, 1))
LEAN = {'CHECKPOINT_POLICY': 'SAVE_NOTHING', 'NUM_LOSS_CHUNKS': 4, 'USE_REPEATED_LAYER': True}
MACHINE = of_target(targets.parse('v6e-64'))


@pytest.fixture(scope='module')
def estimator() -> Estimator:
  e = Qwen3_30B_A3B(NUM_LAYERS=2, MAX_SEQ_LEN=2048)
  return Estimator(Model(e, jax.devices()[0]), MACHINE)


def test_few_tokens_travel_and_many_stay(estimator):
  """A chip gathers 1.2 GB of experts a layer, or exchanges 16 KB for each of its tokens."""
  seconds = lambda layout, rows: estimator.estimate(Candidate(layout, rows, 1, LEAN)).seconds
  assert seconds(SPLIT, 64) < 0.8 * seconds(FSDP, 64)
  assert seconds(SPLIT, 64 * 16) > seconds(FSDP, 64 * 16)


def test_bytes_that_wait(estimator):
  """All experts of two layers are gathered twice and scattered once; nothing hides that."""
  e = estimator.model.experiment
  experts = 2 * 3 * e.NUM_EXPERTS * e.MODEL_DIMS * e.EXPERT_HIDDEN_DIMS * 2
  assert estimator.model.state(e.replaced(**FSDP.values)).experts == experts
  _, exposed = Step(Candidate(FSDP, 64, 1, LEAN), estimator).sent
  assert exposed == pytest.approx(3 * experts * 63 / 64 / MACHINE.chip.ici_bandwidth)


class Guess:
  """Estimates that put all meshes with expert parallelism last, or first."""

  def __init__(self, penalty: float):
    self.penalty = penalty

  def estimate(self, candidate: Candidate) -> Estimate:
    return Estimate(1.0, candidate.rows * (self.penalty if candidate.layout.has_experts else 1), 0)


class Pool:
  """Says that expert parallelism takes half of the time."""

  size = 1

  def judge(self, asked):
    for i, (_, values, _) in enumerate(asked):
      yield i, Verdict(1.0, 1.0 if 'expert' in values['MESH_AXES'] else 2.0)


@pytest.mark.parametrize('penalty', [0.5, 2.0])
def test_a_plan_compares_both(penalty):
  space = Space(Qwen3_30B_A3B(), MACHINE, global_batch=256, values=(LEAN,))
  plan = Search(space, Guess(penalty), Pool(), None, 4, lambda _: None).run()
  assert {j.candidate.layout.has_experts for j in plan.judged} == {False, True}
  args = argparse.Namespace(fdl_config='Qwen3_30B_A3B', attributes={}, fiddler=[], most=4)
  (line,) = (x for x in pages.page(plan, args).splitlines() if x.startswith('Expert'))
  split, whole = line.split(' takes 0.50 of the time of ')
  assert 'expert' in split.removeprefix('Expert')
  assert 'expert' not in whole
