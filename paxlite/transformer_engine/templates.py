"""Transformer Engine in the config of a task: its products, or its block and the block's limits."""

import fiddle as fdl
from fiddle import selectors

from paxlite.config.templates import template
from paxlite.core.errors import UserError, listed
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.transformer import Transformer
from paxlite.layers.moe.moe import MoeFeedForward
from paxlite.layers.precision.dot_general_einsum import DotGeneralEinsum
from paxlite.layers.precision.einsum import Einsum
from paxlite.transformer_engine import products
from paxlite.transformer_engine.layer import TeTransformerLayer

# Attributes, with the only values that Transformer Engine's layer supports.
_ONLY = {
  'PACKED_INPUT': (False,), 'ACTIVATION_CLS': ('gelu', 'relu', 'silu'), 'ROPE_FACTOR': (1.0,),
  'SLIDING_WINDOW': (0,), 'ATTENTION_BLOCK_SIZE': (0,), 'USE_PER_DIM_SCALE': (False,),
  'USE_LORA': (False,), 'NUM_PREDICTION_MODULES': (0,),
}  # fmt: skip

# Attributes that are passed to the layer, or that do not change its result.
_KNOWN = (
  'MODEL_DIMS', 'HIDDEN_DIMS', 'DIMS_PER_HEAD', 'NUM_HEADS', 'NUM_KV_HEADS', 'ACTIVATION_CLS',
  'USE_GATED_ACTIVATION', 'USE_BIAS', 'USE_FFN_BIAS', 'NORM_CLS', 'LAYERNORM_EPSILON',
  'NORM_SCALE_OFFSET', 'USE_ROTARY_POSITION_EMB', 'ROPE_LAYOUT', 'ROPE_THETA', 'DROPOUT_PROB',
  'INIT_STD', 'WEIGHT_INIT', 'FPROP_DTYPE', 'ATTEN_LOGIT_CAP', 'USE_FLASH_ATTENTION',
)  # fmt: skip


def complete(e: LanguageModel, task: fdl.Config) -> None:
  """Edits the config of a task in plain XLA, as USE_TE and TE_RECIPE of its experiment say.

  Raises:
    UserError: As te_block does, or TE_RECIPE=NVFP4 does not support the sizes of the model.
  """
  if e.TE_RECIPE == 'NVFP4':
    _check_nvfp4(e)
  if e.USE_TE == 'layer':
    task.model.transformer_tpl.layer_tpl = te_block(e, task.model)
  else:
    for einsum in selectors.select(task.model, Einsum, check_nonempty=False):
      fdl.update_callable(einsum, DotGeneralEinsum)
      einsum.dot_general_tpl = template(products.te_dot_general, recipe=e.TE_RECIPE)
    # Transformer Engine's dot_general has no batch dimensions, which experts need.
    for experts in selectors.select(task.model, MoeFeedForward, check_nonempty=False):
      experts.einsum_tpl = template(Einsum)
  task.context = template(products.te_context, recipe=e.TE_RECIPE)


def te_block(e: Transformer, model: fdl.Config) -> fdl.Partial:
  """Returns the template of a TeTransformerLayer that computes the same as e's blocks.

  Raises UserError if Transformer Engine's layer has no equivalent of some attributes, or of a block
  that the experiment has changed.

  Args:
    model: The config of its TransformerLm, in plain XLA.
  """
  check_supported(e)
  if model.transformer_tpl.layer_tpl != Transformer.model(e).transformer_tpl.layer_tpl:
    raise UserError(
      f"{type(e).__name__} changes its blocks, which Transformer Engine's fused layer does not "
      'support: USE_TE=gemm replaces only matrix multiplications'
    )
  return template(
    TeTransformerLayer, model_dims=e.MODEL_DIMS, hidden_dims=e.HIDDEN_DIMS, num_heads=e.NUM_HEADS,
    num_kv_heads=e.NUM_KV_HEADS, activation=e.ACTIVATION_CLS, gated=e.USE_GATED_ACTIVATION,
    use_bias=e.USE_BIAS, norm=e.NORM_CLS, epsilon=e.LAYERNORM_EPSILON,
    norm_offset=e.NORM_SCALE_OFFSET,
    rotary_layout=e.ROPE_LAYOUT if e.USE_ROTARY_POSITION_EMB else None, rotary_theta=e.ROPE_THETA,
    dropout=e.DROPOUT_PROB, w_init=e.weight_init(e.INIT_STD),
  )  # fmt: skip


def check_supported(e: Transformer) -> None:
  """Raises UserError if Transformer Engine's layer cannot compute what the model's blocks do."""
  problems = [
    f'{name}={found} (only {" or ".join(map(str, values))})'
    for name, values in _ONLY.items()
    if (found := options.value(e, name)) not in values
  ]
  offsets = (0, 1) if e.NORM_CLS == 'LayerNorm' else (0,)
  if e.NORM_SCALE_OFFSET not in offsets:
    problems.append(f'NORM_SCALE_OFFSET={e.NORM_SCALE_OFFSET:g} with {e.NORM_CLS}')
  if e.ATTEN_LOGIT_CAP > 0:
    problems.append(f'ATTEN_LOGIT_CAP={e.ATTEN_LOGIT_CAP:g} (only -1)')
  if e.NUM_HEADS * e.DIMS_PER_HEAD != e.MODEL_DIMS:
    problems.append('NUM_HEADS × DIMS_PER_HEAD other than MODEL_DIMS')
  if e.USE_FFN_BIAS != e.USE_BIAS:
    problems.append(f'USE_FFN_BIAS={e.USE_FFN_BIAS} with USE_BIAS={e.USE_BIAS}')
  problems += [f'the mesh axis {a}' for a in ('stage', 'context') if e.mesh_sizes.get(a, 1) > 1]
  known = Transformer(**{name: getattr(e, name) for name in _KNOWN})
  if not problems and (e.layer() != e.block() or e.block() != known.block()):
    problems.append(f'the blocks of {type(e).__name__}, which compute something else')
  if problems:
    raise UserError(
      f"Transformer Engine's fused layer does not support: {listed(problems)}. Choose the backend "
      'that replaces only matrix multiplications, or none'
    )


def _check_nvfp4(e: Transformer) -> None:
  """Raises UserError unless Transformer Engine's kernels for NVFP4 take the sizes of e's blocks.

  On a device, its Hadamard transform takes 64 tokens × 128 features of bfloat16 at a time.
  """
  mdl, context = (e.mesh_sizes.get(axis, 1) for axis in ('mdl', 'context'))
  sizes = [
    ('MODEL_DIMS', e.MODEL_DIMS, 128), ('HIDDEN_DIMS', e.HIDDEN_DIMS // mdl, 128),
    ('NUM_HEADS × DIMS_PER_HEAD', e.NUM_HEADS * e.DIMS_PER_HEAD // mdl, 128),
    ('NUM_KV_HEADS × DIMS_PER_HEAD', e.NUM_KV_HEADS * e.DIMS_PER_HEAD // mdl, 128),
    ('DIMS_PER_HEAD', e.DIMS_PER_HEAD, 16), ('MAX_SEQ_LEN', e.MAX_SEQ_LEN // context, 64),
  ]  # fmt: skip
  problems = [
    f'{name} of {size} on a device (only multiples of {unit})'
    for name, size, unit in sizes
    if size % unit
  ]
  if e.FPROP_DTYPE != 'bfloat16':
    problems.append(f'FPROP_DTYPE={e.FPROP_DTYPE} (only bfloat16)')
  if problems:
    raise UserError(f'TE_RECIPE=NVFP4 does not support: {listed(problems)}. Choose another recipe')
