"""How the published models of Granite are stored; see weights.family."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.granite import Granite, GraniteHybrid
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Same,
  activation,
  heads,
  read_types,
  write_types,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import MODEL_COUNTS, NO_MLP_BIAS, PLAIN, UNTIED, number
from paxlite.weights.mamba_keys import STEP_LIMITS, mamba_kinds
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_layout import mamba2_entries

# The shared experts of blocks with experts are the feed-forward layer of blocks without.
_SHARED_MLP = {
  'gate_up': 'model.layers.{i}.shared_mlp.input_linear.weight',
  'down': 'model.layers.{i}.shared_mlp.output_linear.weight',
}
_OWN_EXPERTS = ('gate', 'up', 'down', 'expert_gate', 'expert_up')
_OTHERS = {k: v for k, v in tensor_names.HUGGING_FACE.items() if k not in _OWN_EXPERTS}
GRANITE_HYBRID = _OTHERS | tensor_names.MAMBA2 | {
  **_SHARED_MLP,
  **{f'shared_{role}': name for role, name in _SHARED_MLP.items()},
  'router': 'model.layers.{i}.block_sparse_moe.router.layer.weight',
  'expert_gate_up': 'model.layers.{i}.block_sparse_moe.input_linear.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.output_linear.weight',
}  # fmt: skip


def _read_granite_types(config: Config) -> dict[str, object]:
  attention = 'full' if config.get('position_embedding_type') == 'rope' else 'full_nope'
  types = config.get('layer_types', config.get('layers_block_type'))
  given = config if types is None else {**config, 'layer_types': types}
  return {'ATTENTION_PATTERN': read_types(given, lambda _: 'mamba2', mamba_kinds(attention))}


def _write_granite_types(e: LanguageModel) -> JsonObject:
  has_rope = any(kind.attention in (None, 'full') for kind in e.block_kinds)
  types = write_types(e, 'full', mamba_kinds('full' if has_rope else 'full_nope'))
  return {'layer_types': types, 'position_embedding_type': 'rope' if has_rope else None}


GRANITE_TYPES = Both(
  ('layer_types', 'layers_block_type', 'position_embedding_type'), ('ATTENTION_PATTERN',),
  _read_granite_types, _write_granite_types,
)  # fmt: skip


def _read_granite_experts(config: Config) -> dict[str, object]:
  shared = config['shared_intermediate_size']
  if not config['num_local_experts']:
    return {'HIDDEN_DIMS': shared, 'NUM_DENSE_BLOCKS': config['num_hidden_layers']}
  return {
    'HIDDEN_DIMS': shared, 'SHARED_EXPERT_HIDDEN_DIMS': shared,
    'EXPERT_HIDDEN_DIMS': config['intermediate_size'], 'NUM_EXPERTS': config['num_local_experts'],
    'NUM_EXPERTS_PER_TOKEN': config['num_experts_per_tok'], 'NUM_DENSE_BLOCKS': 0,
  }  # fmt: skip


def _write_granite_experts(e: LanguageModel) -> JsonObject:
  assert isinstance(e, MixtureOfExperts)
  if not e.has_any_experts:
    return {
      'shared_intermediate_size': e.HIDDEN_DIMS, 'intermediate_size': e.HIDDEN_DIMS,
      'num_local_experts': 0, 'num_experts_per_tok': 0,
    }  # fmt: skip
  if not all(kind.has_experts for kind in e.block_kinds):
    raise UserError(
      f'Hugging Face has no NUM_DENSE_BLOCKS={e.NUM_DENSE_BLOCKS} with experts in this family'
    )
  return {
    'shared_intermediate_size': e.SHARED_EXPERT_HIDDEN_DIMS,
    'intermediate_size': e.EXPERT_HIDDEN_DIMS,
    'num_local_experts': e.NUM_EXPERTS,
    'num_experts_per_tok': e.NUM_EXPERTS_PER_TOKEN,
  }


# Either all blocks have experts beside the shared one, or none has.
GRANITE_EXPERTS = Both(
  ('shared_intermediate_size', 'intermediate_size', 'num_local_experts', 'num_experts_per_tok'),
  (
    'HIDDEN_DIMS', 'SHARED_EXPERT_HIDDEN_DIMS', 'EXPERT_HIDDEN_DIMS', 'NUM_EXPERTS',
    'NUM_EXPERTS_PER_TOKEN', 'NUM_DENSE_BLOCKS',
  ),
  _read_granite_experts,
  _write_granite_experts,
)  # fmt: skip


def _read_heads(config: Config) -> dict[str, object]:
  count, width = config['mamba_n_heads'], config.get('mamba_d_head', 'auto')
  inner = config.get('mamba_expand', 2) * config['hidden_size']
  if width == 'auto':
    width = inner // count
  if count * width != inner:
    raise UserError(
      f'mamba_n_heads={count} × mamba_d_head={width} must be mamba_expand × hidden_size={inner}'
    )
  return {'MAMBA_HEADS': count, 'MAMBA_HEAD_DIMS': width}


def _write_heads(e: LanguageModel) -> JsonObject:
  assert isinstance(e, Mamba2Layers)
  count, width = e.MAMBA_HEADS, e.MAMBA_HEAD_DIMS
  if count * width % e.MODEL_DIMS:
    raise UserError(
      f'Hugging Face has no MAMBA_HEADS={count} × MAMBA_HEAD_DIMS={width} that is not a multiple '
      f'of MODEL_DIMS={e.MODEL_DIMS} in this family'
    )
  expand = count * width // e.MODEL_DIMS
  return {'mamba_n_heads': count, 'mamba_d_head': width, 'mamba_expand': expand}


MAMBA_HEADS = Both(
  ('mamba_n_heads', 'mamba_d_head', 'mamba_expand'), ('MAMBA_HEADS', 'MAMBA_HEAD_DIMS'),
  _read_heads, _write_heads,
)  # fmt: skip
_FACTORS = (
  number('embedding_multiplier', 'EMBEDDING_FACTOR'),
  number('residual_multiplier', 'RESIDUAL_FACTOR'),
  number('attention_multiplier', 'ATTENTION_FACTOR'),
  number('logits_scaling', 'LOGITS_DIVISOR'),
)

FAMILIES: dict[str, Family] = {
  'granite': Family(
    'GraniteForCausalLM', Granite,
    (
      *PLAIN, Same('attention_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
      number('embedding_multiplier', 'EMBEDDING_FACTOR'),
      number('residual_multiplier', 'RESIDUAL_FACTOR'),
      number('attention_multiplier', 'ATTENTION_FACTOR'),
      number('logits_scaling', 'LOGITS_DIVISOR'),
    ),
    classifier=None,
  ),
  'granitemoehybrid': Family(
    'GraniteMoeHybridForCausalLM', GraniteHybrid,
    (
      *MODEL_COUNTS, heads(), Same('rms_norm_eps', 'LAYERNORM_EPSILON'), UNTIED, rope(),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('attention_bias', 'USE_BIAS', default=False), NO_MLP_BIAS,
      OneOf('normalization_function', 'rmsnorm'), *_FACTORS,
      GRANITE_TYPES, GRANITE_EXPERTS, MAMBA_HEADS, STEP_LIMITS,
      Same('mamba_n_groups', 'MAMBA_GROUPS', default=1),
      Same('mamba_d_state', 'MAMBA_STATE_DIMS', default=256),
      Same('mamba_d_conv', 'CONVOLUTION_WIDTH', default=4),
      Same('mamba_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      Same('mamba_proj_bias', 'USE_STATE_BIAS', default=False),
    ),
    GRANITE_HYBRID,
    classifier=None,
    layers={'mamba2': mamba2_entries},
  ),
}  # fmt: skip
