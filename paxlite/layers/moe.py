"""Mixtures of experts, in which each token passes through a few of many feed-forward layers.

A router chooses the experts of each token. A dispatch moves tokens to their experts and back. There
are two: with a capacity, which limits the number of tokens of an expert, and dropless.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from paxlite.core.templates import Template, template_field
from paxlite.layers.einsum import Einsum
from paxlite.layers.feedforward import ACTIVATIONS
from paxlite.layers.projection import Initializer
from paxlite.layers.sown import LOSSES, SUMMARIES
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import gather_weight, param, shard

_FAN_IN = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')
_FAN_IN_BY_EXPERT = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform', batch_axis=0)


class Routing(NamedTuple):
  """The X experts of each token, starting with the one of highest probability."""

  experts_JMX: jax.Array  # int32
  weights_JMX: jax.Array  # float32; they sum to 1 for each token, and are 0 for padding
  probabilities_JME: jax.Array  # float32
  is_token_JM: jax.Array  # bool; False for padding


class Places(NamedTuple):
  """Each token's place with each of its experts, and whether it has that place."""

  places_JMX: jax.Array  # int32
  has_place_JMX: jax.Array  # bool


class TopKRouter(nn.Module):
  """Chooses the X experts of highest probability for each token, by softmax(x·gate) in float32.

  Their probabilities are renormalized to sum to 1, even if an expert has no place left, as in
  GShard (https://arxiv.org/abs/2006.16668) and GLaM (https://arxiv.org/abs/2112.06905).

  Attributes:
    num_experts: E.
    top_k: X.
    w_init: Initializer of gate [D, E].
  """

  num_experts: int
  top_k: int = 2
  w_init: Initializer = _FAN_IN

  @nn.compact
  def __call__(self, x_JMD: jax.Array, is_token_JM: jax.Array) -> Routing:
    shape, axes = [x_JMD.shape[-1], self.num_experts], ['embed', None]
    gate_DE = param(self, 'gate', self.w_init, shape, axes)
    logits_JME = jnp.einsum('JMD,DE->JME', x_JMD.astype(jnp.float32), gate_DE)
    return route(logits_JME, is_token_JM, self.top_k)


def route(logits_JME: jax.Array, is_token_JM: jax.Array, top_k: int) -> Routing:
  """Returns the routing to the experts with the `top_k` largest logits, which are float32."""
  probabilities_JME = jax.nn.softmax(logits_JME, axis=-1)
  values_JMX, experts_JMX = jax.lax.top_k(probabilities_JME, top_k)
  weights_JMX = values_JMX / (values_JMX.sum(-1, keepdims=True) + 1e-9)
  return Routing(experts_JMX, weights_JMX * is_token_JM[..., None], probabilities_JME, is_token_JM)


def load_balance_loss(routing: Routing) -> jax.Array:
  """Returns E²·mean(mean_M(probability) · mean_M(is the first choice)), GShard's auxiliary loss.

  It is 1 if all experts have equal load and probability. As in Pax, padding counts in the
  denominators of both inner means, but not in their numerators.
  """
  E = routing.probabilities_JME.shape[-1]
  tokens_JM1 = routing.is_token_JM[..., None]
  first_JME = jax.nn.one_hot(routing.experts_JMX[..., 0], E) * tokens_JM1
  mean = lambda x_JME: (x_JME * tokens_JM1).mean(1)
  return (mean(routing.probabilities_JME) * mean(first_JME)).mean() * E**2


def assign_places(routing: Routing, capacity: int) -> Places:
  """Assigns places in the order of tokens, to all first choices, then to all second choices …"""
  E = routing.probabilities_JME.shape[-1]
  taken_JE: Any = 0
  places = []
  for k in range(routing.experts_JMX.shape[-1]):
    expert_JM = routing.experts_JMX[..., k]
    chosen_JME = jax.nn.one_hot(expert_JM, E, dtype=jnp.int32) * routing.is_token_JM[..., None]
    before_JME = jnp.cumsum(chosen_JME, axis=1) - chosen_JME
    if k:
      before_JME += taken_JE[:, None]
    places.append(jnp.take_along_axis(before_JME, expert_JM[..., None], axis=-1))
    taken_JE += chosen_JME.sum(1)
  places_JMX = jnp.concatenate(places, axis=-1)
  return Places(places_JMX, (places_JMX < capacity) & routing.is_token_JM[..., None])


@dataclasses.dataclass(frozen=True)
class Experts:
  """The function of the experts: w_out·activation(w_in·x).

  Attributes:
    w_in_EDF: The input weights.
    w_out_EFD: The output weights.
    activation: The activation function.
    einsum_in: Multiplies by the input weights, 'JECD,EDF->JECF'.
    einsum_out: Multiplies by the output weights, 'JECF,EFD->JECD'.
  """

  w_in_EDF: jax.Array
  w_out_EFD: jax.Array
  activation: Callable[[jax.Array], jax.Array]
  einsum_in: Callable[[jax.Array, jax.Array], jax.Array]
  einsum_out: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class CapacityDispatch:
  """A dispatch in which each expert has a limited number of places for the tokens of a group.

  A token without a place gets no output from that expert.

  Attributes:
    capacity_factor: An expert has M / E times this many places in a group; see `capacity`.
  """

  capacity_factor: float = 2.0

  def __call__(
    self, x_JMD: jax.Array, routing: Routing, experts: Experts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns Σ weight · expert(x) [J, M, D], and which choices had a place [J, M, X]."""
    J, M, D = x_JMD.shape
    E, X = routing.probabilities_JME.shape[-1], routing.experts_JMX.shape[-1]
    C = capacity(M, E, self.capacity_factor)
    places_JMX, kept_JMX = assign_places(routing, C)

    # Tokens are moved by index. GShard multiplies by a mask [M, E·C] instead, which would cost a
    # large part of the experts' own computation. Dropped tokens go to the extra place E·C.
    place_JMX = jnp.where(kept_JMX, routing.experts_JMX * C + places_JMX, E * C)
    token_JMX = jnp.broadcast_to(jnp.arange(M)[:, None], (J, M, X))
    put = jax.vmap(lambda place, token: jnp.full(E * C + 1, M).at[place].set(token))
    token_JP = put(place_JMX.reshape(J, -1), token_JMX.reshape(J, -1))[:, :-1]
    take = jax.vmap(lambda rows, index: rows.at[index].get(mode='fill', fill_value=0))
    in_JPD = shard(take(x_JMD, token_JP), 'batch', None, 'act_embed')

    # from sharding by group to sharding by expert, the all-to-all of expert parallelism
    in_JECD = shard(in_JPD.reshape(J, E, C, D), 'expert_groups', 'experts', None, 'act_embed')
    w_in_EDF = gather_weight(experts.w_in_EDF, ['experts', 'expert_embed', 'mlp'])
    hidden_JECF = experts.einsum_in(in_JECD, w_in_EDF)
    hidden_JECF = shard(hidden_JECF, 'expert_groups', 'experts', None, 'act_mlp')
    w_out_EFD = gather_weight(experts.w_out_EFD, ['experts', 'mlp', 'expert_embed'])
    out_JECD = experts.einsum_out(experts.activation(hidden_JECF), w_out_EFD)
    out_JECD = shard(out_JECD, 'expert_groups', 'experts', None, 'act_embed')
    out_JPD = shard(out_JECD.reshape(J, E * C, D), 'batch', None, 'act_embed')
    out_JMXD = take(out_JPD, place_JMX)
    weights_JMX = routing.weights_JMX.astype(x_JMD.dtype)
    return jnp.einsum('JMXD,JMX->JMD', out_JMXD, weights_JMX), kept_JMX


def capacity(group_size: int, num_experts: int, factor: float) -> int:
  """Returns the number of an expert's places for one group: a multiple of 4, and at least 4."""
  return max(-(-int(group_size * factor / num_experts) // 4) * 4, 4)


@dataclasses.dataclass(frozen=True)
class DroplessDispatch:
  """A dispatch that gives every token a place with each of its experts, by jax.lax.ragged_dot.

  Tokens are sorted by expert. If experts are sharded over devices, each device gathers the tokens
  of the other devices and computes the output of its own experts for them. On CPU, XLA computes
  every expert for every token and masks the result, which is correct but slow.
  """

  def __call__(
    self, x_JMD: jax.Array, routing: Routing, experts: Experts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns Σ weight · expert(x) [J, M, D], and which choices are not of padding [J, M, X]."""
    kept_JMX = jnp.broadcast_to(routing.is_token_JM[..., None], routing.experts_JMX.shape)
    w_in_EDF, activation = experts.w_in_EDF, experts.activation
    weights_JMX = routing.weights_JMX.astype(x_JMD.dtype)
    arguments = x_JMD, routing.experts_JMX, weights_JMX, w_in_EDF, experts.w_out_EFD
    active = partitioning.active_mesh()
    if active is None or active[0].size == 1:
      return _sorted_experts(*arguments, activation=activation), kept_JMX
    mesh, rules = active
    fitted = lambda names, shape: partitioning.fitting(
      partitioning.spec(names, rules), shape, dict(mesh.shape)
    )
    tokens = fitted(('batch', None, None), x_JMD.shape)
    over, hidden = fitted(('experts', 'mlp'), w_in_EDF.shape[::2])
    body = functools.partial(
      _sharded_experts,
      activation=activation,
      expert_axis=over,
      tokens_differ=over in partitioning.axes_of(tokens[0]),
      hidden_axis=hidden,
    )
    sharded = jax.shard_map(
      body,
      mesh=mesh,
      in_specs=(
        tokens,
        tokens,
        tokens,
        PartitionSpec(over, None, hidden),
        PartitionSpec(over, hidden, None),
      ),
      out_specs=tokens,
      check_vma=False,
    )
    return sharded(*arguments), kept_JMX


def _sharded_experts(
  x_JMD: jax.Array,
  experts_JMX: jax.Array,
  weights_JMX: jax.Array,
  w_in_EDF: jax.Array,
  w_out_EFD: jax.Array,
  activation: Any,
  expert_axis: str | None,
  tokens_differ: bool,
  hidden_axis: str | None,
) -> jax.Array:
  """Computes _sorted_experts on one device, which holds some groups, some experts, and part of F.

  Args:
    x_JMD: The tokens of this device.
    experts_JMX: Their experts, numbered from 0 over the experts of all devices.
    weights_JMX: The weights of these experts.
    w_in_EDF: The input weights of this device's experts, for its part of F.
    w_out_EFD: The output weights of this device's experts, for its part of F.
    activation: The activation function.
    expert_axis: The mesh axis over which experts are sharded, or None.
    tokens_differ: Whether tokens are sharded over expert_axis too.
    hidden_axis: The mesh axis over which F is sharded, or None.
  """
  if tokens_differ:
    gather = lambda x: jax.lax.all_gather(x, expert_axis, tiled=True)
    x_JMD, experts_JMX, weights_JMX = gather(x_JMD), gather(experts_JMX), gather(weights_JMX)
  if expert_axis is not None:
    experts_JMX = experts_JMX - jax.lax.axis_index(expert_axis) * w_in_EDF.shape[0]
  y_JMD = _sorted_experts(x_JMD, experts_JMX, weights_JMX, w_in_EDF, w_out_EFD, activation)
  if hidden_axis is not None:
    y_JMD = jax.lax.psum(y_JMD, hidden_axis)
  if tokens_differ:
    y_JMD = jax.lax.psum_scatter(y_JMD, expert_axis, tiled=True)
  elif expert_axis is not None:
    y_JMD = jax.lax.psum(y_JMD, expert_axis)
  return y_JMD


def _sorted_experts(
  x_JMD: jax.Array,
  experts_JMX: jax.Array,
  weights_JMX: jax.Array,
  w_in_EDF: jax.Array,
  w_out_EFD: jax.Array,
  activation: Any,
) -> jax.Array:
  """Returns Σ weight · expert(x) over the local experts 0 … E − 1; other experts contribute 0."""
  J, M, D = x_JMD.shape
  E, X = w_in_EDF.shape[0], experts_JMX.shape[-1]
  expert_R = experts_JMX.reshape(-1)  # R = J·M·X
  is_ours_R = (expert_R >= 0) & (expert_R < E)
  order_R = jnp.argsort(jnp.where(is_ours_R, expert_R, E), stable=True)
  sizes_E = jnp.zeros(E, jnp.int32).at[jnp.where(is_ours_R, expert_R, E)].add(1, mode='drop')
  # ragged_dot leaves rows after sum(sizes) undefined, so that they and their gradients are masked
  is_held_R1 = is_ours_R[order_R, None]
  x_RD = jnp.where(is_held_R1, x_JMD.reshape(-1, D)[order_R // X], 0)
  hidden_RF = activation(jax.lax.ragged_dot(x_RD, w_in_EDF, sizes_E))
  y_RD = jax.lax.ragged_dot(hidden_RF, w_out_EFD, sizes_E)
  weight_R = jnp.where(is_ours_R, weights_JMX.reshape(-1), 0)[order_R]
  y_RD = jnp.where(is_held_R1, y_RD, 0) * weight_R[:, None]
  return jnp.zeros_like(x_JMD.reshape(-1, D)).at[order_R // X].add(y_RD).reshape(J, M, D)


class MoeFeedForward(nn.Module):
  """y = Σ weight · expert(x) over the X experts of a token, [B, T, D] to [B, T, D].

  It adds a load-balancing loss to the loss, and writes summaries of load and dropped tokens.

  Attributes:
    model_dims: D.
    hidden_dims: F of each expert.
    num_experts: E.
    num_groups: The number of groups J is the greatest common divisor of this and of the rows B.
    aux_loss_weight: Weight of the load-balancing loss.
    activation: A key of ACTIVATIONS.
    router_tpl: Chooses the experts of each token.
    dispatch_tpl: CapacityDispatch or DroplessDispatch, which moves tokens to experts and back.
    w_init: Initializer of w_in [E, D, F] and w_out [E, F, D].
    einsum_tpl: Multiplies by the experts' weights.
    dtype: The dtype of the experts' computation.
  """

  model_dims: int
  hidden_dims: int
  num_experts: int
  num_groups: int = 1
  aux_loss_weight: float = 0.01
  activation: str = 'relu'
  router_tpl: Template = template_field(TopKRouter)
  dispatch_tpl: Template = template_field(CapacityDispatch)
  w_init: Initializer = _FAN_IN_BY_EXPERT
  einsum_tpl: Template = template_field(Einsum)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None) -> jax.Array:
    B, T, D = x_BTD.shape
    J = math.gcd(B, self.num_groups)
    is_token_BT = jnp.ones([B, T], bool) if paddings_BT is None else ~paddings_BT.astype(bool)
    x_JMD = shard(x_BTD.reshape(J, B * T // J, D), 'batch', None, 'act_embed').astype(self.dtype)
    routing = self.router_tpl(num_experts=self.num_experts, name='router')(
      x_JMD, is_token_BT.reshape(J, -1)
    )
    self.sow(LOSSES, 'load_balance', self.aux_loss_weight * load_balance_loss(routing))
    y_JMD, kept_JMX = self.dispatch_tpl()(x_JMD, routing, self._experts())
    self._sow_load(routing, kept_JMX)
    return shard(y_JMD.reshape(B, T, D), 'batch', 'residual_length', 'act_embed')

  def _experts(self) -> Experts:
    E, D, F = self.num_experts, self.model_dims, self.hidden_dims
    w_in_EDF = param(self, 'w_in', self.w_init, [E, D, F], ['experts', 'expert_embed', 'mlp'])
    w_out_EFD = param(self, 'w_out', self.w_init, [E, F, D], ['experts', 'mlp', 'expert_embed'])
    return Experts(
      w_in_EDF.astype(self.dtype),
      w_out_EFD.astype(self.dtype),
      ACTIVATIONS[self.activation],
      self.einsum_tpl(equation='JECD,EDF->JECF', name='einsum_in'),
      self.einsum_tpl(equation='JECF,EFD->JECD', name='einsum_out'),
    )

  def _sow_load(self, routing: Routing, kept_JMX: jax.Array) -> None:
    """Writes the summaries of load and dropped tokens.

    dispatch_k is the share of tokens that had a place with exactly k experts. over_capacity_k_ratio
    is the share of tokens whose k-th choice had no place. max_expert_load is the load of the
    busiest expert, as a multiple of the mean load.
    """
    X = kept_JMX.shape[-1]
    tokens = jnp.maximum(routing.is_token_JM.sum(), 1)
    count_JM = jnp.where(routing.is_token_JM, kept_JMX.sum(-1), -1)
    for k in range(X + 1):
      self.sow(SUMMARIES, f'dispatch_{k}', (count_JM == k).sum() / tokens)
    for k in range(X):
      over = routing.is_token_JM & ~kept_JMX[..., k]
      self.sow(SUMMARIES, f'over_capacity_{k + 1}_ratio', over.sum() / tokens)
    chosen_JMXE = jax.nn.one_hot(routing.experts_JMX, self.num_experts)
    load_E = (chosen_JMXE * routing.is_token_JM[..., None, None]).sum((0, 1, 2))
    load = load_E.max() / jnp.maximum(load_E.mean(), 1e-6)
    self.sow(SUMMARIES, 'max_expert_load', load)
