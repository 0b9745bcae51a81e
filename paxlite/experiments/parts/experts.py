"""Mixture-of-experts models: which blocks have experts, and how the mesh shards the experts."""

import math
from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import (
  Count,
  Function,
  NotNegative,
  NotNegativeInt,
  OffAtZero,
  Run,
  Shape,
  Training,
)
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.stack import Activation, BlockKind
from paxlite.layers.moe.dropless import DroplessDispatch
from paxlite.layers.moe.group_router import LOAD_BIAS, GroupRouter, balanced
from paxlite.layers.moe.moe import CapacityDispatch, MoeFeedForward, SharedExperts, TopKRouter
from paxlite.layers.projection import Projection
from paxlite.parallel import partitioning

Router = Literal['top_k', 'group_top_k', 'balanced']
RouterScores = Literal['sigmoid', 'softmax']


class MixtureOfExperts(LanguageModel, subject='Mixture of experts'):
  """A LanguageModel in which the first of every BLOCKS_PER_LAYER blocks has experts."""

  BLOCKS_PER_LAYER: Shape[Count] = 2  # blocks per repeated layer; the first has experts
  NUM_DENSE_BLOCKS: Shape[NotNegativeInt] = 0  # blocks without experts before the first layer
  NUM_EXPERTS: Shape[Count] = 64  # experts per layer
  NUM_EXPERTS_PER_TOKEN: Function[Count] = 2  # experts chosen per token
  EXPERT_CAPACITY_FACTOR: Function[float] = (
    2.0  # buffer of an expert, times the mean number of tokens
  )
  AUX_LOSS_COEF: Training[NotNegative] = (
    0.01  # weight of the load-balancing loss, a mean over layers with experts
  )
  USE_DROPLESS_MOE: Function[bool] = False  # experts without capacity, which drop no tokens
  # 0 is a buffer for all tokens. Larger buffers cost memory and time.
  DROPLESS_BUFFER_FACTOR: Function[OffAtZero] = (
    0.0  # buffer of a device's dropless experts, times the mean load; 0: all tokens
  )

  EXPERT_ACTIVATION_CLS: Function[Activation] = 'relu'  # expert activation
  USE_GATED_EXPERTS: Shape[bool] = (
    False  # gated experts: a second projection multiplies the activation
  )
  USE_EXPERT_BIAS: Shape[bool] = False  # expert projection biases
  NORMALIZE_EXPERT_WEIGHTS: Function[bool] = True  # scales a token's expert weights to sum 1
  EXPERT_WEIGHT_SCALE: Function[float] = 1.0  # factor of a token's expert weights
  USE_ROUTER_BIAS: Shape[bool] = False  # learned bias of router logits
  NUM_SHARED_EXPERTS: Shape[NotNegativeInt] = 0  # shared experts, which see every token
  USE_SHARED_EXPERT_GATE: Shape[bool] = False  # learned gate of the shared experts' output
  # Routers: 'top_k' takes the experts of highest probability. 'group_top_k' takes them from a few
  # groups (DeepSeek-V2). 'balanced' does so by sigmoids, with a bias for the load (DeepSeek-V3).
  ROUTER: Shape[Router] = (
    'top_k'  # router: top-k, within groups, or balanced by a bias (DeepSeek-V3)
  )
  NUM_EXPERT_GROUPS: Function[Count] = 1  # expert groups to route among
  NUM_EXPERT_GROUPS_PER_TOKEN: Function[Count] = 1  # groups per token
  ROUTER_BIAS_RATE: Training[OffAtZero] = 0.001  # change per step of the load-balancing bias

  @property
  def EXPERT_HIDDEN_DIMS(self) -> Shape[Count]:
    """Expert width."""
    return self.HIDDEN_DIMS

  @property
  def SHARED_EXPERT_HIDDEN_DIMS(self) -> Shape[NotNegativeInt]:
    """Total width of shared experts."""
    return self.NUM_SHARED_EXPERTS * self.EXPERT_HIDDEN_DIMS

  @property
  def BEST_PER_EXPERT_GROUP(self) -> Function[Count]:
    """Experts of a group summed for its score."""
    return 2 if self.ROUTER == 'balanced' else 1

  @property
  def ROUTER_SCORES(self) -> Function[RouterScores]:
    """Function from router logits to scores."""
    return 'sigmoid' if self.ROUTER == 'balanced' else 'softmax'

  @property
  def blocks_per_layer(self) -> int:
    return math.lcm(self.BLOCKS_PER_LAYER, super().blocks_per_layer)

  @property
  def num_first_blocks(self) -> int:
    return self.NUM_DENSE_BLOCKS

  def has_experts(self, block: int) -> bool:
    behind = block - self.NUM_DENSE_BLOCKS
    return behind >= 0 and behind % self.BLOCKS_PER_LAYER == 0

  @property
  def EXPERT_AXIS(self) -> Run[str | None]:
    """Mesh axis to which tokens travel for their experts; None: each device computes all experts.

    Pax shards experts over data. With an axis of their own, data shards their other dimensions.
    Tokens of dropless experts do not travel over data, as each device would need room for all:
    data splits their weights by expert, or by width, and each layer gathers them.
    """
    if 'expert' in self.MESH_AXES:
      return 'expert'
    if self.USE_DROPLESS_MOE:
      return None
    return 'data' if self.NUM_EXPERTS % self.mesh_sizes['data'] == 0 else None

  @property
  def gathers_experts(self) -> bool:
    return self.USE_DROPLESS_MOE and self.mesh_sizes['data'] > 1

  @property
  def NUM_MOE_GROUPS(self) -> Run[Count]:
    """Groups of sequences that share expert capacity; default: one per batch shard."""
    return self.batch_shards

  @property
  def rules(self) -> partitioning.Rules:
    axis = self.EXPERT_AXIS
    rules = dict(super().rules)
    others = tuple(a for a in partitioning.axes_of(rules['batch']) if a != axis)
    # FSDP gives each device whole experts, if it can. They lie together in memory, so that XLA
    # gathers them in place: with w_out split over D, it copied the gathered weights once more.
    if axis is None and self.USE_DROPLESS_MOE and self.num_stages == 1:
      axis = 'data' if self.NUM_EXPERTS % self.mesh_sizes['data'] == 0 else None
    return rules | {
      'experts': axis,
      'expert_embed': None if axis == 'data' else 'data',
      'expert_groups': others,
    }

  def shared_hidden_dims_of(self, kind: BlockKind) -> int:
    """Returns the width inside the shared experts of a block, all together."""
    return self.SHARED_EXPERT_HIDDEN_DIMS

  def validate(self) -> None:
    if self.USE_DROPLESS_MOE and self.backend.name in ('xla_fp8', 'int8'):
      raise UserError(
        f'{self.backend} needs experts with a capacity, because their matrix multiplications have '
        'one shape: USE_DROPLESS_MOE=False'
      )
    super().validate()
    if self.EXPERT_ACTIVATION_CLS == 'clamped_swiglu' and not self.USE_GATED_EXPERTS:
      raise UserError('EXPERT_ACTIVATION_CLS=clamped_swiglu needs USE_GATED_EXPERTS=True')
    if self.NUM_EXPERTS_PER_TOKEN > self.NUM_EXPERTS:
      raise UserError(
        f'NUM_EXPERTS_PER_TOKEN={self.NUM_EXPERTS_PER_TOKEN} is more than '
        f'NUM_EXPERTS={self.NUM_EXPERTS}'
      )
    if self.EXPERT_CAPACITY_FACTOR <= 0:
      raise UserError(
        f'EXPERT_CAPACITY_FACTOR={self.EXPERT_CAPACITY_FACTOR:g} must be above 0; for no limit: '
        'USE_DROPLESS_MOE=True'
      )
    groups = self.NUM_EXPERT_GROUPS
    if self.NUM_EXPERTS % groups or groups < self.NUM_EXPERT_GROUPS_PER_TOKEN:
      raise UserError(
        f'NUM_EXPERTS={self.NUM_EXPERTS} must be divisible by NUM_EXPERT_GROUPS={groups}, and '
        f'NUM_EXPERT_GROUPS_PER_TOKEN={self.NUM_EXPERT_GROUPS_PER_TOKEN} at most that number'
      )
    if self.NUM_SHARED_EXPERTS and not self.SHARED_EXPERT_HIDDEN_DIMS:
      raise UserError(f'NUM_SHARED_EXPERTS={self.NUM_SHARED_EXPERTS} have no hidden units')
    available = self.NUM_EXPERT_GROUPS_PER_TOKEN * (self.NUM_EXPERTS // groups)
    if available < self.NUM_EXPERTS_PER_TOKEN:
      raise UserError(
        f'NUM_EXPERTS_PER_TOKEN={self.NUM_EXPERTS_PER_TOKEN} is more than the experts of '
        f'NUM_EXPERT_GROUPS_PER_TOKEN={self.NUM_EXPERT_GROUPS_PER_TOKEN} groups'
      )
    if self.ROUTER == 'top_k' and (groups > 1 or self.EXPERT_WEIGHT_SCALE != 1):
      raise UserError(
        'NUM_EXPERT_GROUPS and EXPERT_WEIGHT_SCALE are for ROUTER=group_top_k and balanced'
      )
    if self.ROUTER == 'top_k' and self.ROUTER_SCORES != 'softmax':
      raise UserError(f'ROUTER_SCORES={self.ROUTER_SCORES} is for ROUTER=group_top_k and balanced')
    axis = self.EXPERT_AXIS
    if axis not in (None, 'data', 'expert') or (axis is not None and axis not in self.MESH_AXES):
      raise UserError(
        f'EXPERT_AXIS={axis} must be None, data, or expert where MESH_AXES={self.MESH_AXES} has it'
      )
    if axis is not None and self.NUM_EXPERTS % self.mesh_sizes[axis]:
      raise UserError(
        f'NUM_EXPERTS={self.NUM_EXPERTS} is not divisible by the mesh axis {axis} = '
        f'{self.mesh_sizes[axis]}: EXPERT_AXIS=None gives each device a part of all'
      )

  @property
  def generating_values(self) -> dict[str, object]:
    """Dropless experts: those with a capacity leave out tokens for others of the batch."""
    return super().generating_values | dict(USE_DROPLESS_MOE=True)

  def task(self) -> fdl.Config:
    task = super().task()
    if self.ROUTER == 'balanced':
      task.rules = {LOAD_BIAS: template(balanced, rate=self.ROUTER_BIAS_RATE)}
    return task

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.has_experts:
      block.ffn_tpl = self.experts()
      if self.NUM_SHARED_EXPERTS:
        block.ffn_tpl = template(
          SharedExperts,
          experts_tpl=block.ffn_tpl,
          shared_tpl=self.feed_forward(self.shared_hidden_dims_of(kind)),
          gate_tpl=template(Projection) if self.USE_SHARED_EXPERT_GATE else None,
        )
    return block

  def experts(self) -> fdl.Partial:
    """Returns the template of a feed-forward layer with experts."""
    return template(
      MoeFeedForward,
      model_dims=self.MODEL_DIMS,
      hidden_dims=self.EXPERT_HIDDEN_DIMS,
      num_experts=self.NUM_EXPERTS,
      num_groups=self.NUM_MOE_GROUPS,
      aux_loss_weight=self.AUX_LOSS_COEF / max(self.num_expert_blocks, 1),
      activation=self.EXPERT_ACTIVATION_CLS,
      gated=self.USE_GATED_EXPERTS,
      use_bias=self.USE_EXPERT_BIAS,
      router_tpl=self.router(),
      dispatch_tpl=(
        template(DroplessDispatch, room=self.DROPLESS_BUFFER_FACTOR)
        if self.USE_DROPLESS_MOE
        else template(CapacityDispatch, capacity_factor=self.EXPERT_CAPACITY_FACTOR)
      ),
      dtype=self.FPROP_DTYPE,
    )

  def router(self) -> fdl.Partial:
    """Returns the template of the router."""
    common: dict[str, object] = dict(
      top_k=self.NUM_EXPERTS_PER_TOKEN,
      normalized=self.NORMALIZE_EXPERT_WEIGHTS,
      use_bias=self.USE_ROUTER_BIAS,
    )
    if self.ROUTER == 'top_k':
      return template(TopKRouter, **common)
    return template(
      GroupRouter, num_groups=self.NUM_EXPERT_GROUPS, top_groups=self.NUM_EXPERT_GROUPS_PER_TOKEN,
      best_per_group=self.BEST_PER_EXPERT_GROUP, use_sigmoid=self.ROUTER_SCORES == 'sigmoid',
      has_bias=self.ROUTER == 'balanced', scale=self.EXPERT_WEIGHT_SCALE, **common,
    )  # fmt: skip

  @property
  def num_expert_blocks(self) -> int:
    return sum(kind.has_experts for kind in self.block_kinds)

  @property
  def active_experts(self) -> float:
    return self.NUM_EXPERTS_PER_TOKEN / self.NUM_EXPERTS

  def block_params(self, kind: BlockKind) -> int:
    if not kind.has_experts:
      return super().block_params(kind)
    hidden = self.NUM_EXPERTS_PER_TOKEN * self.EXPERT_HIDDEN_DIMS + self.shared_hidden_dims_of(kind)
    chosen = (3 if self.USE_GATED_EXPERTS else 2) * self.MODEL_DIMS * hidden
    moe = chosen + self.MODEL_DIMS * self.NUM_EXPERTS
    return super().block_params(kind) - self.ffn_params + moe


class GatedExperts(MixtureOfExperts):
  """A mixture of experts as most published models have it: gated and dropless, in every block."""

  BLOCKS_PER_LAYER = 1
  EXPERT_ACTIVATION_CLS: Activation = 'silu'
  USE_GATED_EXPERTS = True
  USE_DROPLESS_MOE = True
  AUX_LOSS_COEF = 0.001
