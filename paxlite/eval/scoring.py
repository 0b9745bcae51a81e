"""Scores continuations by log-likelihood, the basis of zero-shot evaluation.

Rows of similar length share a batch, which is padded to the length of a bucket and not to the
longest row of all. Continuations that differ only in their last token ("yes" or "no" after a
passage) share a row. The logits of the vocabulary are computed only at the positions of
continuations. Where most of the tokens belong to beginnings that rows share, as the examples of a
few-shot prompt, the engine reads each beginning once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.generation.engine import Engine
from paxlite.generation.request import Request, check_ids
from paxlite.generation.scheduler import common
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import partitioning

_SMALLEST_BUCKET = 32
_ENGINE_ROWS = 8
_WORTH_SHARING = 2  # so many times as many tokens as with shared beginnings


@dataclasses.dataclass(frozen=True)
class Continuation:
  """Token ids of a context and of the continuation to score."""

  context: Sequence[int]
  continuation: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Score:
  """The score of one continuation."""

  log_likelihood: float  # Σ ln p of the continuation's tokens, in nats
  is_greedy: bool  # whether each token of the continuation is the likeliest one
  is_truncated: bool  # whether the context has lost its beginning


@dataclasses.dataclass
class _Row:
  """One sequence of inputs, and the alternatives for its last `num_targets` tokens."""

  inputs: list[int]  # token ids of the row
  num_targets: int  # number of positions at the end of the row that are scored
  targets: list[list[int]]  # token ids of the alternatives, each [num_targets]
  numbers: list[int]  # number of the continuation that each alternative belongs to
  truncated: set[int]  # numbers of the continuations whose context has lost its beginning


_Result = tuple[jax.Array, jax.Array]  # what Scorer._score returns


class Scorer:
  """Scores continuations with a model.

  Args:
    model: The language model.
    params: The model's parameters, on the mesh; None: they are set before each use.
    max_len: Largest number of tokens in a row; a longer context loses its beginning.
    batch_tokens: Approximate number of tokens in a batch, padding included.
    mesh: The mesh over which the batch is sharded; None: one device.
    rules: The mapping from logical axes to mesh axes.
  """

  def __init__(
    self,
    model: TransformerLm,
    params: PyTree | None,
    max_len: int,
    batch_tokens: int = 4096,
    mesh: Mesh | None = None,
    rules: partitioning.Rules = partitioning.DEFAULT_RULES,
  ):
    self._model: Any = model  # Flax declares that apply may return a pair
    self.params = params
    self._max_len = max_len
    self._batch_tokens = batch_tokens
    self._mesh = mesh
    self._rules = rules
    if mesh is None:
      self._program = jax.jit(self._score)
    else:
      on_mesh = partitioning.activate(mesh, rules)(self._score)
      self._program = jax.jit(on_mesh, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def __call__(
    self,
    continuations: Sequence[Continuation],
    report: Callable[[int, int], None] = lambda done, total: None,
  ) -> list[Score]:
    """Returns the score of each continuation, in their order.

    Raises UserError if a continuation has no token, no context, ids outside the vocabulary, or more
    tokens than a row.

    Args:
      continuations: Continuations, each with at least one token and one token of context.
      report: Called with the number of rows done and the number of all rows.
    """
    rows = self._rows_of(continuations)
    scores: list[Score | None] = [None] * len(continuations)
    if _shares(rows):
      self._by_engine(rows, scores, report)
    else:
      self._by_batches(rows, scores, report)
    assert all(s is not None for s in scores)
    return [s for s in scores if s is not None]

  def _by_batches(
    self, rows: Sequence[_Row], scores: list[Score | None], report: Callable[[int, int], None]
  ) -> None:
    done = 0
    pending: tuple[list[_Row], _Result] | None = None
    for batch in self._batches(rows):
      result = self._run(batch)
      if pending is not None:  # one batch late, so that the device computes meanwhile
        _collect(*pending, scores)
      pending = batch, result
      done += len(batch)
      report(done, len(rows))
    if pending is not None:
      _collect(*pending, scores)

  def _by_engine(
    self, rows: Sequence[_Row], scores: list[Score | None], report: Callable[[int, int], None]
  ) -> None:
    """Scores each alternative as a separate prompt; neighbors share a beginning."""
    engine = self._engine
    engine.params = self.params
    asked = [
      (Request([*row.inputs, target[-1]], 0, scored_from=len(row.inputs) + 1 - len(target)), row, c)
      for row in sorted(rows, key=lambda row: row.inputs)
      for c, target in enumerate(row.targets)
    ]
    answers = engine.answers([request for request, *_ in asked])
    for done, (i, answer) in enumerate(answers, 1):
      _, row, c = asked[i]
      found = [s for s in answer.prompt_scores if s is not None]
      number = row.numbers[c]
      scores[number] = Score(
        sum(s.log_prob for s in found), all(s.is_greedy for s in found), number in row.truncated
      )
      report(done, len(asked))
    engine.params = None  # which holds no more room than `params` does

  @functools.cached_property
  def _engine(self) -> Engine:
    return Engine(
      self._model, None, self._max_len + 1, mesh=self._mesh, rules=self._rules,
      most_rows=_ENGINE_ROWS,
    )  # fmt: skip

  def _rows_of(self, continuations: Sequence[Continuation]) -> list[_Row]:
    rows: dict[tuple[tuple[int, ...], int], _Row] = {}
    assert self.params is not None
    vocab_size = self.params['embedding']['emb_var'].shape[0]
    for number, c in enumerate(continuations):
      if not c.context or not c.continuation:
        raise UserError(f'continuation {number} needs at least one token, and one before it')
      if len(c.continuation) > self._max_len:
        raise UserError(
          f"a continuation of {len(c.continuation):,} tokens is longer than the model's limit of "
          f'{self._max_len:,}'
        )
      check_ids([*c.context, *c.continuation], vocab_size, f'continuation {number}')
      whole = [*c.context, *c.continuation[:-1]]
      inputs = whole[-self._max_len :]
      n = len(c.continuation)
      row = rows.setdefault((tuple(inputs), n), _Row(inputs, n, [], [], set()))
      row.targets.append(list(c.continuation))
      row.numbers.append(number)
      if len(whole) > len(inputs):
        row.truncated.add(number)
    return list(rows.values())

  def _batches(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Yields batches of rows sorted by length, the longest first.

    With this order, memory runs out in the first batch or never. A batch is as long as the bucket
    of its longest row. All batches but the last one are full, because a shorter row costs no more
    than the padding row that it replaces.
    """
    ordered = sorted(rows, key=lambda r: (len(r.inputs), r.num_targets), reverse=True)
    start = 0
    while start < len(ordered):
      stop = start + self._batch_rows(self._bucket(len(ordered[start].inputs)))
      yield ordered[start:stop]
      start = stop

  def _bucket(self, length: int) -> int:
    return min(bucket(length), self._max_len)

  def _batch_rows(self, length: int) -> int:
    shards = (
      1 if self._mesh is None else partitioning.num_shards(self._mesh.shape, self._rules, 'batch')
    )
    return max(1, self._batch_tokens // length // shards) * shards

  def _run(self, batch: Sequence[_Row]) -> _Result:
    T = self._bucket(len(batch[0].inputs))
    B = self._batch_rows(T)
    K = _power_of_two(max(r.num_targets for r in batch))
    C = _power_of_two(max(len(r.targets) for r in batch))
    ids = np.zeros((B, T), np.int32)
    positions = np.zeros((B, K), np.int32)
    targets = np.zeros((B, C, K), np.int32)
    is_target = np.zeros((B, K), bool)
    for r, row in enumerate(batch):
      length, n = len(row.inputs), row.num_targets
      ids[r, :length] = row.inputs
      positions[r, :n] = np.arange(length - n, length)
      is_target[r, :n] = True
      targets[r, : len(row.targets), :n] = row.targets
    arrays = (ids, positions, targets, is_target)
    if self._mesh is not None:
      sharding = NamedSharding(self._mesh, partitioning.spec(('batch',), self._rules))
      rows = partitioning.process_rows(sharding, B)
      make = jax.make_array_from_process_local_data
      arrays = tuple(make(sharding, x[rows], x.shape) for x in arrays)
    return self._program(self.params, *arrays)

  def _score(
    self,
    params: PyTree,
    ids_BT: jax.Array,
    places_BU: jax.Array,
    targets_BWU: jax.Array,
    is_target_BU: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns ln p of each alternative, and whether its tokens are the most likely; [B, W] each."""
    x_BTD = self._model.apply({'params': params}, ids_BT, None, None, method='hidden')
    x_BUD = jnp.take_along_axis(x_BTD, places_BU[:, :, None], axis=1)
    logits_BUV = self._model.apply({'params': params}, x_BUD, method='logits')
    log_p_BUV = jax.nn.log_softmax(logits_BUV.astype(jnp.float32))
    log_p_BWU = jnp.take_along_axis(log_p_BUV, targets_BWU.swapaxes(1, 2), axis=2).swapaxes(1, 2)
    is_target_B1U = is_target_BU[:, None]
    best_B1U = log_p_BUV.argmax(-1)[:, None]
    is_greedy_BW = ((targets_BWU == best_B1U) | ~is_target_B1U).all(-1)
    return jnp.where(is_target_B1U, log_p_BWU, 0).sum(-1), is_greedy_BW


def bucket(length: int) -> int:
  """Returns the smallest of 32, 48, 64, 96, 128, 192 … that is at least `length`.

  Above 32, at most a third of a row is padding.
  """
  size = _SMALLEST_BUCKET
  while size < length:
    size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
  return size


def _shares(rows: Sequence[_Row]) -> bool:
  """Returns whether most tokens of the rows belong to beginnings that other rows have too."""
  ordered = sorted(row.inputs for row in rows)
  total = sum(map(len, ordered))
  own = total - sum(common(a, b) for a, b in itertools.pairwise(ordered))
  return total > _WORTH_SHARING * own


def _power_of_two(n: int) -> int:
  return 1 << (n - 1).bit_length()


def _collect(batch: Sequence[_Row], result: _Result, scores: list[Score | None]) -> None:
  log_likelihoods, greedy = jax.device_get(result)
  for r, row in enumerate(batch):
    for c, number in enumerate(row.numbers):
      scores[number] = Score(
        float(log_likelihoods[r, c]), bool(greedy[r, c]), number in row.truncated
      )
