"""Mixtures of experts: feed-forward layers of which each token passes through a few.

Shape letters beside the usual: G groups of S tokens that share out the capacity of experts, E
experts with C places for a group's tokens, K experts a token.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
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
  """Where tokens go: their K experts, the likeliest first."""

  experts_GSK: jax.Array  # int32
  weights_GSK: jax.Array  # float32; they sum to 1, and are 0 for padding
  probabilities_GSE: jax.Array  # float32
  is_token_GS: jax.Array  # bool; False for padding


class Places(NamedTuple):
  """A token's place with each of its experts, while there are any."""

  places_GSK: jax.Array  # int32
  has_place_GSK: jax.Array  # bool


class TopKRouter(nn.Module):
  """softmax(x·gate) in float32, and the K likeliest experts of each token.

  Their probabilities are renormalised to sum to 1, whether or not the experts have a place left, as
  in GShard (https://arxiv.org/abs/2006.16668) and GLaM (https://arxiv.org/abs/2112.06905).

  Attributes:
    num_experts: E.
    top_k: K.
    w_init: Of gate [D, E].
  """

  num_experts: int
  top_k: int = 2
  w_init: Initializer = _FAN_IN

  @nn.compact
  def __call__(self, x_GSD: jax.Array, is_token_GS: jax.Array) -> Routing:
    shape, axes = [x_GSD.shape[-1], self.num_experts], ['embed', None]
    gate_DE = param(self, 'gate', self.w_init, shape, axes)
    logits_GSE = jnp.einsum('GSD,DE->GSE', x_GSD.astype(jnp.float32), gate_DE)
    return route(logits_GSE, is_token_GS, self.top_k)


def route(logits_GSE: jax.Array, is_token_GS: jax.Array, top_k: int) -> Routing:
  """The routing that float32 logits ask for."""
  probabilities_GSE = jax.nn.softmax(logits_GSE, axis=-1)
  values_GSK, experts_GSK = jax.lax.top_k(probabilities_GSE, top_k)
  weights_GSK = values_GSK / (values_GSK.sum(-1, keepdims=True) + 1e-9)
  return Routing(experts_GSK, weights_GSK * is_token_GS[..., None], probabilities_GSE, is_token_GS)


def load_balance_loss(routing: Routing) -> jax.Array:
  """E²·mean(mean_S(probability) · mean_S(is the first choice)): 1 where all experts are equal.

  GShard's auxiliary loss. Padding counts in no numerator and in both denominators, as in Pax.
  """
  E = routing.probabilities_GSE.shape[-1]
  tokens_GS1 = routing.is_token_GS[..., None]
  first_GSE = jax.nn.one_hot(routing.experts_GSK[..., 0], E) * tokens_GS1
  mean = lambda x_GSE: (x_GSE * tokens_GS1).mean(1)
  return (mean(routing.probabilities_GSE) * mean(first_GSE)).mean() * E**2


def assign_places(routing: Routing, capacity: int) -> Places:
  """First come, first served: all first choices in order, then all second choices, and so on."""
  E = routing.probabilities_GSE.shape[-1]
  taken_GE: Any = 0
  places = []
  for k in range(routing.experts_GSK.shape[-1]):
    expert_GS = routing.experts_GSK[..., k]
    chosen_GSE = jax.nn.one_hot(expert_GS, E, dtype=jnp.int32) * routing.is_token_GS[..., None]
    before_GSE = jnp.cumsum(chosen_GSE, axis=1) - chosen_GSE
    if k:
      before_GSE += taken_GE[:, None]
    places.append(jnp.take_along_axis(before_GSE, expert_GS[..., None], axis=-1))
    taken_GE += chosen_GSE.sum(1)
  places_GSK = jnp.concatenate(places, axis=-1)
  return Places(places_GSK, (places_GSK < capacity) & routing.is_token_GS[..., None])


class MoeFeedForward(nn.Module):
  """y = Σ weight · expert(x) over K experts of w_out·activation(w_in·x), [B, T, D] to [B, T, D].

  An expert has a limited number of places for the tokens of a group: a token that finds none gets
  nothing from that expert. Adds a load-balancing loss, and summaries of load and drops.

  Attributes:
    model_dims: D.
    hidden_dims: F of each expert.
    num_experts: E.
    num_groups: G: as many as there are shards of the batch, or one where rows do not divide so.
    capacity_factor: An expert's places in a group: this times S / E.
    aux_loss_weight: Of the load-balancing loss.
    activation: A key of ACTIVATIONS.
    router_tpl: Chooses experts.
    w_init: Of w_in [E, D, F] and w_out [E, F, D].
    einsum_tpl: Multiplies by experts' weights.
    dtype: Of the experts' computation.
  """

  model_dims: int
  hidden_dims: int
  num_experts: int
  num_groups: int = 1
  capacity_factor: float = 2.0
  aux_loss_weight: float = 0.01
  activation: str = 'relu'
  router_tpl: Template = template_field(TopKRouter)
  w_init: Initializer = _FAN_IN_BY_EXPERT
  einsum_tpl: Template = template_field(Einsum)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None) -> jax.Array:
    B, T, D = x_BTD.shape
    G = math.gcd(B, self.num_groups)
    is_token_BT = jnp.ones([B, T], bool) if paddings_BT is None else ~paddings_BT.astype(bool)
    x_GSD = shard(x_BTD.reshape(G, B * T // G, D), 'batch', None, 'act_embed').astype(self.dtype)
    routing = self.router_tpl(num_experts=self.num_experts, name='router')(
      x_GSD, is_token_BT.reshape(G, -1)
    )
    self.sow(LOSSES, 'load_balance', self.aux_loss_weight * load_balance_loss(routing))
    shape, axes = [self.num_experts, D, self.hidden_dims], ['experts', 'expert_embed', 'mlp']
    w_in_EDF = param(self, 'w_in', self.w_init, shape, axes).astype(self.dtype)
    shape, axes = [self.num_experts, self.hidden_dims, D], ['experts', 'mlp', 'expert_embed']
    w_out_EFD = param(self, 'w_out', self.w_init, shape, axes).astype(self.dtype)
    y_GSD = self.apply_experts(x_GSD, routing, w_in_EDF, w_out_EFD)
    y_BTD = shard(y_GSD.reshape(B, T, D), 'batch', 'residual_length', 'act_embed')
    return checkpoint_name(y_BTD, 'ffn2')

  def apply_experts(
    self, x_GSD: jax.Array, routing: Routing, w_in_EDF: jax.Array, w_out_EFD: jax.Array
  ) -> jax.Array:
    """Σ weight · expert(x), [G, S, D]."""
    G, S, D = x_GSD.shape
    E, K = self.num_experts, routing.experts_GSK.shape[-1]
    C = capacity(S, E, self.capacity_factor)
    places, kept_GSK = assign_places(routing, C)
    self._sow_load(routing, kept_GSK)

    # Tokens move by index: as a matrix multiplication with a mask [S, E·C], as GShard has it, the
    # move would cost a good part of the experts' own work. Place E·C is where drops go.
    place_GSK = jnp.where(kept_GSK, routing.experts_GSK * C + places, E * C)
    token_GSK = jnp.broadcast_to(jnp.arange(S)[:, None], (G, S, K))
    put = jax.vmap(lambda place, token: jnp.full(E * C + 1, S).at[place].set(token))
    token_GP = put(place_GSK.reshape(G, -1), token_GSK.reshape(G, -1))[:, :-1]
    take = jax.vmap(lambda rows, index: rows.at[index].get(mode='fill', fill_value=0))
    in_GPD = shard(take(x_GSD, token_GP), 'batch', None, 'act_embed')

    # from split by group to split by expert: the all-to-all of expert parallelism
    in_GECD = shard(in_GPD.reshape(G, E, C, D), 'expert_groups', 'experts', None, 'act_embed')
    einsum_in = self.einsum_tpl(equation='GECD,EDF->GECF', name='einsum_in')
    w_in_EDF = gather_weight(w_in_EDF, ['experts', 'expert_embed', 'mlp'])
    hidden_GECF = einsum_in(in_GECD, w_in_EDF)
    hidden_GECF = checkpoint_name(hidden_GECF, 'ffn1')
    hidden_GECF = shard(hidden_GECF, 'expert_groups', 'experts', None, 'act_mlp')
    activated_GECF = ACTIVATIONS[self.activation](hidden_GECF)
    einsum_out = self.einsum_tpl(equation='GECF,EFD->GECD', name='einsum_out')
    w_out_EFD = gather_weight(w_out_EFD, ['experts', 'mlp', 'expert_embed'])
    out_GECD = einsum_out(activated_GECF, w_out_EFD)
    out_GECD = shard(out_GECD, 'expert_groups', 'experts', None, 'act_embed')
    out_GPD = shard(out_GECD.reshape(G, E * C, D), 'batch', None, 'act_embed')
    out_GSKD = take(out_GPD, place_GSK)
    return jnp.einsum('GSKD,GSK->GSD', out_GSKD, routing.weights_GSK.astype(self.dtype))

  def _sow_load(self, routing: Routing, kept_GSK: jax.Array) -> None:
    """Summaries: the share of tokens with so many experts, and that were over an expert's capacity.

    Also max_expert_load: of the busiest expert, as a multiple of the mean.
    """
    K = kept_GSK.shape[-1]
    tokens = jnp.maximum(routing.is_token_GS.sum(), 1)
    count_GS = jnp.where(routing.is_token_GS, kept_GSK.sum(-1), -1)
    for k in range(K + 1):
      self.sow(SUMMARIES, f'dispatch_{k}', (count_GS == k).sum() / tokens)
    for k in range(K):
      over = routing.is_token_GS & ~kept_GSK[..., k]
      self.sow(SUMMARIES, f'over_capacity_{k + 1}_ratio', over.sum() / tokens)
    chosen_GSKE = jax.nn.one_hot(routing.experts_GSK, self.num_experts)
    load_E = (chosen_GSKE * routing.is_token_GS[..., None, None]).sum((0, 1, 2))
    load = load_E.max() / jnp.maximum(load_E.mean(), 1e-6)
    self.sow(SUMMARIES, 'max_expert_load', load)


def capacity(group_size: int, num_experts: int, factor: float) -> int:
  """Places of an expert for the tokens of one group: a multiple of 4, and at least 4."""
  return max(-(-int(group_size * factor / num_experts) // 4) * 4, 4)


class DroplessMoeFeedForward(MoeFeedForward):
  """The same experts with a place for every token, by jax.lax.ragged_dot.

  Tokens are sorted by expert, so that groups and capacity do not matter. Where experts are spread
  over devices, each gathers the tokens of its peers and computes what its own experts add to them.
  On CPU, XLA computes every expert for every token and masks: right, and slow.
  """

  def apply_experts(
    self, x_GSD: jax.Array, routing: Routing, w_in_EDF: jax.Array, w_out_EFD: jax.Array
  ) -> jax.Array:
    """Σ weight · expert(x), [G, S, D]."""
    self._sow_load(routing, jnp.broadcast_to(routing.is_token_GS[..., None], routing[0].shape))
    weights_GSK = routing.weights_GSK.astype(self.dtype)
    arguments = x_GSD, routing.experts_GSK, weights_GSK, w_in_EDF, w_out_EFD
    activation = ACTIVATIONS[self.activation]
    active = partitioning.active_mesh()
    if active is None or active[0].size == 1:
      return _sorted_experts(*arguments, activation=activation)
    mesh, rules = active
    fitted = lambda names, shape: partitioning.fitting(
      partitioning.spec(names, rules), shape, dict(mesh.shape)
    )
    tokens = fitted(('batch', None, None), x_GSD.shape)
    over, hidden = fitted(('experts', 'mlp'), w_in_EDF.shape[::2])
    body = functools.partial(
      _spread_experts,
      activation=activation,
      expert_axis=over,
      tokens_differ=over in partitioning.axes_of(tokens[0]),
      hidden_axis=hidden,
    )
    return jax.shard_map(
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
    )(*arguments)


def _spread_experts(
  x_GSD: jax.Array,
  experts_GSK: jax.Array,
  weights_GSK: jax.Array,
  w_in_EDF: jax.Array,
  w_out_EFD: jax.Array,
  activation: Any,
  expert_axis: str | None,
  tokens_differ: bool,
  hidden_axis: str | None,
) -> jax.Array:
  """_sorted_experts on one device, which holds some groups, some experts, and part of F.

  Args:
    x_GSD: And the next four: see _sorted_experts; what is here of each.
    experts_GSK: See there.
    weights_GSK: See there.
    w_in_EDF: See there.
    w_out_EFD: See there.
    activation: Of the hidden units.
    expert_axis: Mesh axis that experts are spread over.
    tokens_differ: Whether tokens are spread over it too.
    hidden_axis: Mesh axis that F is spread over.
  """
  if tokens_differ:
    gather = lambda x: jax.lax.all_gather(x, expert_axis, tiled=True)
    x_GSD, experts_GSK, weights_GSK = gather(x_GSD), gather(experts_GSK), gather(weights_GSK)
  if expert_axis is not None:
    experts_GSK = experts_GSK - jax.lax.axis_index(expert_axis) * w_in_EDF.shape[0]
  y_GSD = _sorted_experts(x_GSD, experts_GSK, weights_GSK, w_in_EDF, w_out_EFD, activation)
  if hidden_axis is not None:
    y_GSD = jax.lax.psum(y_GSD, hidden_axis)
  if tokens_differ:
    y_GSD = jax.lax.psum_scatter(y_GSD, expert_axis, tiled=True)
  elif expert_axis is not None:
    y_GSD = jax.lax.psum(y_GSD, expert_axis)
  return y_GSD


def _sorted_experts(
  x_GSD: jax.Array,
  experts_GSK: jax.Array,
  weights_GSK: jax.Array,
  w_in_EDF: jax.Array,
  w_out_EFD: jax.Array,
  activation: Any,
) -> jax.Array:
  """Σ weight · expert(x) over the experts 0 … E − 1; others are someone else's."""
  G, S, D = x_GSD.shape
  E, K = w_in_EDF.shape[0], experts_GSK.shape[-1]
  expert_R = experts_GSK.reshape(-1)  # R = G·S·K rows, one an expert of a token
  is_ours_R = (expert_R >= 0) & (expert_R < E)
  order_R = jnp.argsort(jnp.where(is_ours_R, expert_R, E), stable=True)
  sizes_E = jnp.zeros(E, jnp.int32).at[jnp.where(is_ours_R, expert_R, E)].add(1, mode='drop')
  # rows after those of our experts hold nothing, nor do their gradients
  is_held_R1 = is_ours_R[order_R, None]
  x_RD = jnp.where(is_held_R1, x_GSD.reshape(-1, D)[order_R // K], 0)
  hidden_RF = activation(jax.lax.ragged_dot(x_RD, w_in_EDF, sizes_E))
  y_RD = jax.lax.ragged_dot(hidden_RF, w_out_EFD, sizes_E)
  weight_R = jnp.where(is_ours_R, weights_GSK.reshape(-1), 0)[order_R]
  y_RD = jnp.where(is_held_R1, y_RD, 0) * weight_R[:, None]
  return jnp.zeros_like(x_GSD.reshape(-1, D)).at[order_R // K].add(y_RD).reshape(G, S, D)
