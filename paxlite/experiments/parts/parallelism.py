"""The mesh of devices, how arrays are sharded over it, and how XLA compiles for it."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from paxlite.compilation import compiler
from paxlite.config.attribute_kinds import Run
from paxlite.core.errors import UserError
from paxlite.experiments.parts.part import Part
from paxlite.parallel import mesh, partitioning

if TYPE_CHECKING:
  import jax


class Parallelism(Part, subject='Mesh of devices'):
  """Devices per mesh axis within a slice or host (ICI), and copies across slices or hosts (DCN).

  Axes besides those of Pax: stage (pipeline), expert, and context, which splits sequences.
  """

  MESH_AXES: Run[list[str]] = ['replica', 'data', 'mdl']  # mesh axis names, slowest first
  ICI_MESH_SHAPE: Run[list[int]] = [1, 1, 1]  # mesh axis sizes within a host or slice
  DCN_MESH_SHAPE: Run[list[int]] = [1, 1, 1]  # mesh axis sizes between hosts or slices
  SEQUENCE_SHARDED_ACTIVATIONS: Run[bool] = (
    False  # shards activations between blocks over mdl by length, not width
  )
  DETERMINISTIC: Run[bool] = False  # avoids GPU kernels with a varying order of sums
  COMPILER_OPTIONS: Run[list[str]] = []  # XLA options, name=value, for the devices they suit

  @property
  def rules(self) -> partitioning.Rules:
    """The mesh axes of each logical axis."""
    rules = dict(partitioning.ALL_RULES)
    if self.SEQUENCE_SHARDED_ACTIVATIONS:
      rules |= {'residual_length': ('context', 'mdl'), 'act_embed': None}
    if 'stage' in self.MESH_AXES:
      # data is smaller than the number of devices by the stages: rows are looked up where they
      # enter the pipeline, and not by all devices along data
      rules |= {'lookup_batch': rules['outer_batch'], 'lookup_length': rules['length']}
      rules |= {'lookup_embed': None, 'exchanged_embed': None}
      rules |= {'embed': 'data'}  # stages gather weights over data alone: see stage_weights
    return partitioning.rules_for(self.MESH_AXES, rules)

  @property
  def mesh_sizes(self) -> dict[str, int]:
    """The number of devices by mesh axis."""
    shape = mesh.mesh_shape(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE)
    return dict(zip(self.MESH_AXES, shape, strict=True))

  @property
  def num_devices(self) -> int:
    return math.prod(self.mesh_sizes.values())

  @property
  def num_stages(self) -> int:
    """The number of pipeline stages, which is the size of the mesh axis stage."""
    return self.mesh_sizes.get('stage', 1)

  def mesh(self, devices: Sequence['jax.Device'] | None = None) -> Mesh:
    """Returns the mesh over `devices`, or all devices; UserError if their number does not fit."""
    return mesh.make_mesh(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices)

  def compiler_options(
    self, platform: str, is_known: Callable[[str, compiler.Option], bool] = compiler.is_known_here
  ) -> dict[str, compiler.Option]:
    """Returns the options of the train step for the devices of a platform: cpu, gpu, tpu.

    They are those of COMPILER_OPTIONS and DETERMINISTIC and, for several GPUs or TPUs, paxlite's
    own.

    Args:
      platform: JAX's name of the platform.
      is_known: Whether the XLA of the devices takes an option.
    """
    options: dict[str, compiler.Option] = {}
    if self.DETERMINISTIC:
      options['xla_gpu_exclude_nondeterministic_ops'] = True
    options |= dict(map(compiler_option, self.COMPILER_OPTIONS))
    given = compiler.of_kind(platform, options)
    scatters_each = self.scatters_each_gradient(platform)
    return compiler.step_options(
      platform, self.mesh_sizes, given, is_known, scatters_each, self.gathers_experts
    )

  @property
  def gathers_experts(self) -> bool:
    """Whether each device gathers the weights of dropless experts."""
    return False

  def scatters_each_gradient(self, platform: str) -> bool:
    """Returns whether XLA scatters the gradient of each weight of a step by itself.

    Args:
      platform: JAX's name of the platform.
    """
    return False

  def validate(self) -> None:
    # before all others, whose properties read the mesh
    mesh.check_mesh_shape(self.ICI_MESH_SHAPE, self.DCN_MESH_SHAPE, self.MESH_AXES, devices=None)
    super().validate()
    self.compiler_options('')  # raises UserError for an invalid option


def compiler_option(text: str) -> tuple[str, compiler.Option]:
  """Parses 'xla_name=true' into ('xla_name', True); raises UserError for any other form."""
  name, equals, value = (part.strip() for part in text.strip().lstrip('-').partition('='))
  if not equals or not name.startswith('xla_'):
    raise UserError(f'COMPILER_OPTIONS: {text!r} must be xla_NAME=VALUE')
  plain: dict[str, compiler.Option] = {'true': True, 'false': False}
  return name, plain.get(value.lower(), int(value) if value.isdigit() else value)
