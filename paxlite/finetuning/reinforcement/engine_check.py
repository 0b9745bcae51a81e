"""Compares what the engine that draws answers computes with what the trainer computes.

Both have the same parameters. A difference beyond rounding means that the answers are not those of
the model that is trained: a wrong cache, another kernel, or other experts of a token.
"""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from paxlite.core.trees import PyTree
from paxlite.finetuning.reinforcement.row_parts import of_rows
from paxlite.generation.request import TokenScore
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.moe import chosen_experts
from paxlite.layers.sown import CHOSEN, SOWN
from paxlite.losses.metrics import Metrics
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState

# arrays [T] of a row: what the engine has said of each label. Infinity: it has not drawn it
DRAWN, DRAWN_EXPERTS = 'drawn_log_probs', 'drawn_experts'
_READ = 'ids', 'labels', 'weights', 'segment_ids', 'segment_pos'


class Gap(NamedTuple):
  """How far the engine is from the trainer for some drawn tokens.

  Differences are of tokens for which both chose the same experts: where two experts are as good as
  equal, rounding decides which one a token gets, and its output jumps.

  Attributes:
    rollout: The number of the rollout.
    mean: The mean absolute difference of log-probabilities, in nats.
    largest: The largest one.
    experts: The share of tokens for which other experts were chosen in any layer.
    tokens: The number of tokens.
    has_experts: Whether the model has experts.
  """

  rollout: int
  mean: float
  largest: float
  experts: float
  tokens: int
  has_experts: bool


class EngineCheck:
  """Computes drawn tokens again as the train step does, for the first rows of some rollouts.

  Args:
    model: The model that is trained.
    mesh: The mesh of the run.
    rules: Maps logical axes to mesh axes.
    rows: The number of rows that the train step computes at a time, and that are compared.
    interval: The rollouts from one comparison to the next.
    tolerance: The largest difference of log-probabilities without an alarm, with equal experts.
    experts_tolerance: The largest share of tokens with other experts without an alarm.

  Attributes:
    found: What was found, until it is taken.
  """

  def __init__(
    self,
    model: TransformerLm,
    mesh: Mesh,
    rules: partitioning.Rules,
    rows: int,
    interval: int,
    tolerance: float,
    experts_tolerance: float,
  ):
    self._mesh, self._rules, self._rows, self._interval = mesh, rules, rows, interval
    self.tolerance, self.experts_tolerance = tolerance, experts_tolerance
    self.found: list[Gap] = []

    def compute(params: PyTree, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
      with partitioning.activate(mesh, rules):
        bound = model.bind({'params': params}, mutable=(*SOWN, CHOSEN))
        log_probs_BT = Outputs(bound, batch).log_probs
        return log_probs_BT, chosen_experts.numbers(bound.variables, batch['ids'].shape)

    self._compute = jax.jit(compute)

  def row(self, scores: Sequence[TokenScore | None], length: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a row from the scores of its tokens, the first of which is no label."""
    labels = scores[1 : length + 1]
    log_probs = np.full(length, math.inf, np.float32)
    log_probs[: len(labels)] = [math.inf if s is None else s.log_prob for s in labels]
    experts = np.zeros(length, np.uint32)
    experts[: len(labels)] = [0 if s is None else s.experts for s in labels]
    return {DRAWN: log_probs, DRAWN_EXPERTS: experts}

  def __call__(self, params: PyTree, rollout: int, arrays: MutableMapping[str, np.ndarray]) -> None:
    """Takes what `row` has added out of the arrays of a rollout, and compares if it is time.

    Args:
      params: The parameters that have drawn the answers.
      rollout: The number of the rollout.
      arrays: All rows, which every process has.
    """
    drawn_BT, experts_BT = arrays.pop(DRAWN), arrays.pop(DRAWN_EXPERTS)
    if rollout % self._interval:
      return
    its = {name: arrays[name][: self._rows] for name in _READ if name in arrays}
    log_probs_BT, numbers_BT = of_rows(
      self._compute, params, its, self._rows, self._mesh, self._rules
    )
    drawn_BT, experts_BT = drawn_BT[: self._rows], experts_BT[: self._rows]
    is_own_BT = (its['weights'] > 0) & (drawn_BT != math.inf)
    gaps = np.abs(log_probs_BT - drawn_BT)[is_own_BT].astype(np.float64)
    if not gaps.size:
      return
    is_other = (numbers_BT != experts_BT)[is_own_BT]
    same = gaps[~is_other] if not is_other.all() else np.zeros(1)
    found = float(same.mean()), float(same.max()), float(is_other.mean()), gaps.size
    self.found.append(Gap(rollout, *found, bool(numbers_BT.any())))


class EngineAlarm(Callback):
  """Records each comparison as an evaluation called `engine`, and says if it is beyond a bound.

  Args:
    check: Makes the comparisons.
  """

  def __init__(self, check: EngineCheck):
    self._check = check

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    for gap in self._check.found:
      self._report(gap, step, loop)
    self._check.found.clear()

  def _report(self, gap: Gap, step: int, loop: Loop) -> None:
    values = {'log_prob_gap': gap.mean, 'max_log_prob_gap': gap.largest}
    text = f'log-probabilities differ from training by {gap.mean:.2g}, at most {gap.largest:.2g}'
    if gap.has_experts:
      values['other_experts'] = gap.experts
      text += f'; other experts for {gap.experts:.2%} of tokens'
    loop.summaries.result(step, 'engine', values, text)
    if not gap.largest <= self._check.tolerance:
      loop.summaries.say(
        f'ALARM: at step {step:,} generation and training differ by {gap.largest:.2g} in the '
        f'log-probability of a drawn token (ENGINE_TOLERANCE={self._check.tolerance:g}): answers '
        'are not drawn from the model that is trained'
      )
    if gap.experts > self._check.experts_tolerance:
      loop.summaries.say(
        f'ALARM: at step {step:,} generation chose other experts than training for '
        f'{gap.experts:.2%} of tokens (ENGINE_EXPERTS_TOLERANCE='
        f'{self._check.experts_tolerance:g}): other weights are trained than drew them'
      )
