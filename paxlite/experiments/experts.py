"""Mixture-of-experts models: which blocks have experts, and how the mesh shards the experts."""

import math
from typing import Any

import fiddle as fdl

from paxlite.core.attribute_kinds import Count, Function, OffAtZero, Run, Shape, Training
from paxlite.core.errors import UserError
from paxlite.core.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.dropless import DroplessDispatch
from paxlite.layers.moe import CapacityDispatch, MoeFeedForward, TopKRouter
from paxlite.layers.transformer import BlockSequence
from paxlite.parallel import partitioning


class MixtureOfExperts(LanguageModel):
  """A LanguageModel in which the first of every BLOCKS_PER_LAYER blocks has experts."""

  BLOCKS_PER_LAYER: Shape[Count] = 2  # blocks of a layer, of which the first has the experts
  NUM_EXPERTS: Shape[Count] = 64  # of a layer with experts
  NUM_EXPERTS_PER_TOKEN: Function[Count] = 2  # that a router chooses
  EXPERT_CAPACITY_FACTOR: Function[float] = 2.0  # places of an expert, times the mean load
  AUX_LOSS_COEF: Training[float] = (
    0.01  # weight of the load-balancing loss, which is a mean over the layers with experts
  )
  USE_DROPLESS_MOE: Function[bool] = False  # gives every token its place, without a capacity
  # Dropless experts that are sharded over devices: a device has room for this many times the mean
  # number of tokens; 0 is room for all tokens. Room costs memory and time.
  DROPLESS_ROOM: Function[OffAtZero] = 0.0  # places of a device, times the mean; 0: for all

  @property
  def blocks_per_layer(self) -> int:
    return self.BLOCKS_PER_LAYER

  @property
  def EXPERT_AXIS(self) -> Run[str | None]:
    """The mesh axis that shards the experts; None if each device has a part of every expert.

    Pax shards experts over data. With an axis of their own, data shards their other dimensions.
    Dropless experts are not sharded over data, as each device would need room for all tokens.
    """
    if 'expert' in self.MESH_AXES:
      return 'expert'
    if self.USE_DROPLESS_MOE:
      return None
    return 'data' if self.NUM_EXPERTS % self.mesh_sizes['data'] == 0 else None

  @property
  def NUM_MOE_GROUPS(self) -> Run[Count]:
    """Groups of rows that share the capacity of experts; by default one per shard of the batch."""
    return self.batch_shards

  @property
  def rules(self) -> partitioning.Rules:
    axis = self.EXPERT_AXIS
    rules = dict(super().rules)
    others = tuple(a for a in partitioning.axes_of(rules['batch']) if a != axis)
    return rules | {
      'experts': axis,
      'expert_embed': None if axis == 'data' else 'data',
      'expert_groups': others,
    }

  def validate(self) -> None:
    if self.USE_DROPLESS_MOE and self.backend.name in ('xla_fp8', 'int8'):
      raise UserError(
        f'{self.backend} needs experts with a capacity, whose matrix multiplications have one '
        'shape: --fdl.USE_DROPLESS_MOE=False'
      )
    super().validate()
    if self.NUM_EXPERTS_PER_TOKEN > self.NUM_EXPERTS:
      raise UserError(
        f'NUM_EXPERTS_PER_TOKEN={self.NUM_EXPERTS_PER_TOKEN} is more than '
        f'NUM_EXPERTS={self.NUM_EXPERTS}'
      )
    if self.EXPERT_CAPACITY_FACTOR <= 0:
      raise UserError(
        f'EXPERT_CAPACITY_FACTOR={self.EXPERT_CAPACITY_FACTOR:g} must be above 0; for no limit: '
        '--fdl.USE_DROPLESS_MOE=True'
      )
    axis = self.EXPERT_AXIS
    if axis not in (None, 'data', 'expert') or (axis is not None and axis not in self.MESH_AXES):
      raise UserError(
        f'EXPERT_AXIS={axis} must be None, data, or expert where MESH_AXES={self.MESH_AXES} has it'
      )
    if axis is not None and self.NUM_EXPERTS % self.mesh_sizes[axis]:
      raise UserError(
        f'NUM_EXPERTS={self.NUM_EXPERTS} is not divisible by the mesh axis {axis} = '
        f'{self.mesh_sizes[axis]}: --fdl.EXPERT_AXIS=None gives each device a part of all'
      )

  @property
  def decoding_values(self) -> dict[str, Any]:
    """Dropless experts, so that a text does not depend on its neighbors in the batch."""
    return super().decoding_values | dict(USE_DROPLESS_MOE=True)

  def layer(self) -> fdl.Partial:
    blocks = [self.block() for _ in range(self.BLOCKS_PER_LAYER)]
    blocks[0].ffn_tpl = self.experts()
    return template(BlockSequence, block_tpls=blocks)

  def experts(self) -> fdl.Partial:
    """Returns the template of a feed-forward layer with experts."""
    return template(
      MoeFeedForward,
      model_dims=self.MODEL_DIMS,
      hidden_dims=self.HIDDEN_DIMS,
      num_experts=self.NUM_EXPERTS,
      num_groups=self.NUM_MOE_GROUPS,
      aux_loss_weight=self.AUX_LOSS_COEF / self.num_expert_blocks,
      router_tpl=template(TopKRouter, top_k=self.NUM_EXPERTS_PER_TOKEN),
      dispatch_tpl=(
        template(DroplessDispatch, room=self.DROPLESS_ROOM)
        if self.USE_DROPLESS_MOE
        else template(CapacityDispatch, capacity_factor=self.EXPERT_CAPACITY_FACTOR)
      ),
      dtype=self.FPROP_DTYPE,
    )

  @property
  def num_expert_blocks(self) -> int:
    return math.ceil(self.NUM_LAYERS / self.BLOCKS_PER_LAYER)

  @property
  def matmul_params(self) -> int:
    expert = 2 * self.MODEL_DIMS * self.HIDDEN_DIMS
    moe = self.NUM_EXPERTS_PER_TOKEN * expert + self.MODEL_DIMS * self.NUM_EXPERTS
    return super().matmul_params + self.num_expert_blocks * (moe - self.ffn_params)
