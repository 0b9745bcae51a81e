"""Mixtures of experts, in which each token passes through a few of many feed-forward layers.

A router chooses the experts of each token. A dispatch moves tokens to their experts and back. There
are two: CapacityDispatch, which limits the number of tokens of an expert, and the dropless one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from paxlite.config.templates import Template, template_field
from paxlite.layers.activations import ACTIVATIONS, gate_by
from paxlite.layers.precision.einsum import Einsum
from paxlite.layers.projection import Initializer
from paxlite.layers.sown import CHOSEN, LOSSES, SUMMARIES
from paxlite.parallel.partitioning import gather_weight, param, shard

_FAN_IN = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')
_TO_F, _TO_D = dict(equation='JECD,EDF->JECF'), dict(equation='JECF,EFD->JECD')
_FAN_IN_BY_EXPERT = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform', batch_axis=0)


class Routing(NamedTuple):
  """The X experts of each token, starting with the one of highest probability."""

  experts_JMX: jax.Array  # int32
  weights_JMX: jax.Array  # float32; they sum to 1 for each token, and are 0 for padding
  probabilities_JME: jax.Array  # float32
  is_token_JM: jax.Array  # bool; False for padding


class Slots(NamedTuple):
  """Each token's slot with each of its experts, and whether it has that slot."""

  slots_JMX: jax.Array  # int32
  has_slot_JMX: jax.Array  # bool


class TopKRouter(nn.Module):
  """Chooses the X experts of highest probability for each token, by softmax(x·gate) in float32.

  If `normalized`, their probabilities are divided by their sum, even if an expert has no slot
  left, as in GShard (https://arxiv.org/abs/2006.16668) and GLaM (https://arxiv.org/abs/2112.06905).
  """

  num_experts: int  # E
  top_k: int = 2  # X
  normalized: bool = True  # whether the weights of a token's experts sum to 1
  use_bias: bool = False  # whether a bias is added to x·gate
  w_init: Initializer = _FAN_IN  # initializer of gate [D, E]

  @nn.compact
  def __call__(self, x_JMD: jax.Array, is_token_JM: jax.Array) -> Routing:
    return route(self.logits(x_JMD), is_token_JM, self.top_k, self.normalized)

  def logits(self, x_JMD: jax.Array) -> jax.Array:
    """Returns x·gate + bias, [J, M, E] float32."""
    shape, axes = [x_JMD.shape[-1], self.num_experts], ['embed', None]
    equation = 'JMD,DE->JME'
    gate_DE = param(self, 'gate', self.w_init, shape, axes, equation=equation)
    logits_JME = jnp.einsum(equation, x_JMD.astype(jnp.float32), gate_DE)
    if not self.use_bias:
      return logits_JME
    return logits_JME + param(self, 'b', nn.initializers.zeros, [self.num_experts], [None])


def route(
  logits_JME: jax.Array, is_token_JM: jax.Array, top_k: int, normalized: bool = True
) -> Routing:
  """Returns the routing to the experts with the `top_k` largest logits, which are float32."""
  probabilities_JME = jax.nn.softmax(logits_JME, axis=-1)
  values_JMX, experts_JMX = jax.lax.top_k(probabilities_JME, top_k)
  if normalized:
    values_JMX = values_JMX / (values_JMX.sum(-1, keepdims=True) + 1e-9)
  return Routing(experts_JMX, values_JMX * is_token_JM[..., None], probabilities_JME, is_token_JM)


class SharedExperts(nn.Module):
  """y = experts(x) + shared(x): one feed-forward layer for all tokens, and chosen experts."""

  experts_tpl: Template  # a MoeFeedForward
  shared_tpl: Template  # a FeedForward
  # computes a factor of shared(x) from x, which is its sigmoid; None: no factor
  gate_tpl: Template | None = None

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None, *of_tokens_BT: jax.Array
  ) -> jax.Array:
    y_BTD = self.experts_tpl(name='experts')(x_BTD, paddings_BT, *of_tokens_BT)
    shared_BTD = self.shared_tpl(name='shared')(x_BTD, paddings_BT)
    if self.gate_tpl is not None:
      shape, axes = (x_BTD.shape[-1], 1), ('embed', None)
      gate = self.gate_tpl(equation='BTD,DX->BTX', shape=shape, axes=axes, name='shared_gate')
      shared_BTD *= jax.nn.sigmoid(gate(x_BTD))
    return y_BTD + shared_BTD


def load_balance_loss(routing: Routing) -> jax.Array:
  """Returns E²·mean(mean_M(probability) · mean_M(is the first choice)), GShard's auxiliary loss.

  It is 1 if all experts have equal load and probability. Padding counts nowhere: means are over
  the tokens of a group, and groups are weighted by their tokens. In Pax, padding counts in the
  denominators of both inner means.
  """
  J, M, E = routing.probabilities_JME.shape
  tokens_JM1 = routing.is_token_JM[..., None]
  count_J1 = tokens_JM1.sum(1).astype(jnp.float32)
  # both factors are exactly 1 without padding
  positions_per_token_J1 = M / jnp.maximum(count_J1, 1)
  share_J1 = J * count_J1 / jnp.maximum(count_J1.sum(), 1)
  first_JME = jax.nn.one_hot(routing.experts_JMX[..., 0], E)
  mean = lambda x_JME: (x_JME * tokens_JM1).mean(1) * positions_per_token_J1
  return (mean(routing.probabilities_JME) * mean(first_JME) * share_J1).mean() * E**2


def assign_slots(routing: Routing, capacity: int) -> Slots:
  """Assigns slots in the order of tokens, to all first choices, then to all second choices …"""
  E = routing.probabilities_JME.shape[-1]
  taken_JE: jax.Array | int = 0
  slots = []
  for k in range(routing.experts_JMX.shape[-1]):
    expert_JM = routing.experts_JMX[..., k]
    chosen_JME = jax.nn.one_hot(expert_JM, E, dtype=jnp.int32) * routing.is_token_JM[..., None]
    before_JME = jnp.cumsum(chosen_JME, axis=1) - chosen_JME
    if not isinstance(taken_JE, int):
      before_JME += taken_JE[:, None]
    slots.append(jnp.take_along_axis(before_JME, expert_JM[..., None], axis=-1))
    taken_JE += chosen_JME.sum(1)
  slots_JMX = jnp.concatenate(slots, axis=-1)
  return Slots(slots_JMX, (slots_JMX < capacity) & routing.is_token_JM[..., None])


class Weights(NamedTuple):
  """The weights of the experts, sharded by expert and by F.

  There are two input weights if experts are gated, and otherwise one. Experts without biases have
  none of them.
  """

  w_in_EDF: tuple[jax.Array, ...]
  w_out_EFD: jax.Array
  b_in_EF: tuple[jax.Array, ...] = ()
  b_out_ED: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Experts:
  """The function of the experts: w_out·activation(w_in·x + b_in …) + b_out."""

  weights: Weights
  # the activation function, of as many arguments as there are input weights
  activation: Callable[..., jax.Array]
  # multiply by the input weights, 'JECD,EDF->JECF'
  einsum_in: Sequence[Callable[[jax.Array, jax.Array], jax.Array]]
  # multiplies by the output weights, 'JECF,EFD->JECD'
  einsum_out: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class CapacityDispatch:
  """A dispatch in which each expert has a limited number of slots for the tokens of a group.

  A token without a slot gets no output from that expert.
  """

  # an expert has M / E times this many slots in a group; see `capacity`
  capacity_factor: float = 2.0

  def __call__(
    self, x_JMD: jax.Array, routing: Routing, experts: Experts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns Σ weight · expert(x) [J, M, D], and which choices had a slot [J, M, X]."""
    J, M, D = x_JMD.shape
    E, X = routing.probabilities_JME.shape[-1], routing.experts_JMX.shape[-1]
    C = capacity(M, E, self.capacity_factor)
    slots_JMX, kept_JMX = assign_slots(routing, C)

    # Tokens are moved by index. GShard multiplies by a mask [M, E·C] instead, which would cost a
    # large part of the experts' own computation. Dropped tokens go to the extra slot E·C.
    slot_JMX = jnp.where(kept_JMX, routing.experts_JMX * C + slots_JMX, E * C)
    token_JMX = jnp.broadcast_to(jnp.arange(M)[:, None], (J, M, X))
    put = jax.vmap(lambda slot, token: jnp.full(E * C + 1, M).at[slot].set(token))
    token_JP = put(slot_JMX.reshape(J, -1), token_JMX.reshape(J, -1))[:, :-1]
    take = jax.vmap(lambda rows, index: rows.at[index].get(mode='fill', fill_value=0))
    in_JPD = shard(take(x_JMD, token_JP), 'batch', None, 'act_embed')

    # From sharding by group to sharding by expert: the all-to-all of expert parallelism. Both sides
    # are stated for one shape, because XLA of jax 0.12 does not look through the reshape, and then
    # replicates the tokens.
    in_JECD = shard(in_JPD.reshape(J, E, C, D), 'batch', None, None, 'act_embed')
    in_JECD = shard(in_JECD, 'expert_groups', 'experts', None, 'act_embed')
    w = experts.weights
    hidden = []
    for i, w_in_EDF in enumerate(w.w_in_EDF):
      gathered_EDF = gather_weight(w_in_EDF, ['experts', 'expert_embed', 'mlp'])
      hidden_JECF = experts.einsum_in[i](in_JECD, gathered_EDF)
      hidden_JECF = shard(hidden_JECF, 'expert_groups', 'experts', None, 'act_mlp')
      hidden.append(hidden_JECF + w.b_in_EF[i][:, None] if w.b_in_EF else hidden_JECF)
    w_out_EFD = gather_weight(w.w_out_EFD, ['experts', 'mlp', 'expert_embed'])
    out_JECD = experts.einsum_out(experts.activation(*hidden), w_out_EFD)
    for b_ED in w.b_out_ED:
      out_JECD += b_ED[:, None]
    out_JECD = shard(out_JECD, 'expert_groups', 'experts', None, 'act_embed')
    out_JECD = shard(out_JECD, 'batch', None, None, 'act_embed')
    out_JPD = shard(out_JECD.reshape(J, E * C, D), 'batch', None, 'act_embed')
    out_JMXD = take(out_JPD, slot_JMX)
    weights_JMX = routing.weights_JMX.astype(x_JMD.dtype)
    return jnp.einsum('JMXD,JMX->JMD', out_JMXD, weights_JMX), kept_JMX


def capacity(group_size: int, num_experts: int, factor: float) -> int:
  """Returns the number of an expert's slots for one group: a multiple of 4, and at least 4."""
  return max(-(-int(group_size * factor / num_experts) // 4) * 4, 4)


class MoeFeedForward(nn.Module):
  """y = Σ weight · expert(x) over the X experts of a token, [B, T, D] to [B, T, D].

  It adds a load-balancing loss to the loss, and writes summaries of load and dropped tokens. Of
  further arguments of a call, such as the ids of the tokens, the router gets those of each token.
  """

  model_dims: int  # D
  hidden_dims: int  # F of each expert
  num_experts: int  # E
  # the number of groups J is the greatest common divisor of this and of the rows B
  num_groups: int = 1
  aux_loss_weight: float = 0.01  # weight of the load-balancing loss
  activation: str = 'relu'  # a key of ACTIVATIONS
  # whether the activation of a second product with x, w_in_gate, multiplies the first one
  gated: bool = False
  use_bias: bool = False  # whether each product of the experts has a bias
  router_tpl: Template = template_field(TopKRouter)  # chooses the experts of each token
  # a norm of what the experts see, and not the router; None means no norm
  norm_tpl: Template | None = None
  # moves tokens to experts and back: CapacityDispatch or dropless.DroplessDispatch
  dispatch_tpl: Template = template_field(CapacityDispatch)
  w_init: Initializer = _FAN_IN_BY_EXPERT  # initializer of w_in [E, D, F] and w_out [E, F, D]
  einsum_tpl: Template = template_field(Einsum)  # multiplies by the experts' weights
  dtype: DTypeLike = jnp.float32  # the dtype of the experts' computation

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None, *of_tokens_BT: jax.Array
  ) -> jax.Array:
    B, T, D = x_BTD.shape
    J = math.gcd(B, self.num_groups)
    is_token_BT = jnp.ones([B, T], bool) if paddings_BT is None else ~paddings_BT.astype(bool)
    x_JMD = shard(x_BTD.reshape(J, B * T // J, D), 'batch', None, 'act_embed').astype(self.dtype)
    routing = self.router_tpl(num_experts=self.num_experts, name='router')(
      x_JMD, is_token_BT.reshape(J, -1), *(of.reshape(J, -1) for of in of_tokens_BT)
    )
    if self.is_mutable_collection(CHOSEN) and not self.is_initializing():
      self.sow(CHOSEN, 'experts', routing.experts_JMX.reshape(B, T, -1))
    if self.norm_tpl is not None:
      x_JMD = self.norm_tpl(name='norm')(x_JMD)
    self.sow(LOSSES, 'load_balance', self.aux_loss_weight * load_balance_loss(routing))
    y_JMD, kept_JMX = self.dispatch_tpl()(x_JMD, routing, self._experts())
    self._sow_load(routing, kept_JMX)
    return shard(y_JMD.reshape(B, T, D), 'batch', 'residual_length', 'act_embed')

  @property
  def activate(self) -> Callable[..., jax.Array]:
    """The function that makes the hidden units."""
    return gate_by(self.activation) if self.gated else ACTIVATIONS[self.activation]

  @property
  def _in_names(self) -> tuple[str, ...]:
    return ('w_in_gate', 'w_in') if self.gated else ('w_in',)

  def expert_weights(self) -> Weights:
    """Returns the weights of the experts, in the dtype of the computation."""
    E, D, F = self.num_experts, self.model_dims, self.hidden_dims
    names = self._in_names
    axes_in, axes_out = ['experts', 'expert_embed', 'mlp'], ['experts', 'mlp', 'expert_embed']
    made = lambda *args, **of: param(self, *args, **of).astype(self.dtype)
    zeros = nn.initializers.zeros
    weights = Weights(
      tuple(made(name, self.w_init, [E, D, F], axes_in, **_TO_F) for name in names),
      made('w_out', self.w_init, [E, F, D], axes_out, **_TO_D),
    )
    if not self.use_bias:
      return weights
    return weights._replace(
      b_in_EF=tuple(made(f'b{n[1:]}', zeros, [E, F], ['experts', 'mlp']) for n in names),
      b_out_ED=(made('b_out', zeros, [E, D], ['experts', 'expert_embed']),),
    )

  def _experts(self) -> Experts:
    weights = self.expert_weights()
    einsum = self.einsum_tpl  # without axes: the rows of an expert are not split like the batch
    return Experts(
      weights,
      self.activate,
      [einsum(**_TO_F, name=n.replace('w', 'einsum')) for n in self._in_names],
      einsum(**_TO_D, name='einsum_out'),
    )

  def _sow_load(self, routing: Routing, kept_JMX: jax.Array) -> None:
    """Writes the summaries of load and dropped tokens.

    dispatch_k is the share of tokens that had a slot with exactly k experts. over_capacity_k_ratio
    is the share of tokens whose k-th choice had no slot. max_expert_load is the load of the
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
