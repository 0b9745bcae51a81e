"""How the published models of Nemotron-H are stored; see weights.family."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.nemotron import FEED_FORWARD, NemotronH
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
from paxlite.weights.family_keys import MODEL_COUNTS, NO_BIAS, NORMALIZED, number, unread
from paxlite.weights.layout import LayerEntries, decoder_entries
from paxlite.weights.mamba_keys import mamba_kinds
from paxlite.weights.state_layout import mamba2_entries
from paxlite.weights.tensor_entries import Entry

_MIXER = {
  role: name.replace('.mamba.', '.mixer.').replace('model.', 'backbone.')
  for role, name in tensor_names.MAMBA2.items()
}
NEMOTRON_H = _MIXER | {
  'embedding': 'backbone.embeddings.weight', 'final_norm': 'backbone.norm_f.weight',
  'head': 'lm_head.weight', 'attention_norm': 'backbone.layers.{i}.norm.weight',
  'ffn_norm': 'backbone.layers.{i}.norm.weight', 'query': 'backbone.layers.{i}.mixer.q_proj.weight',
  'key': 'backbone.layers.{i}.mixer.k_proj.weight',
  'value': 'backbone.layers.{i}.mixer.v_proj.weight',
  'post': 'backbone.layers.{i}.mixer.o_proj.weight',
  'up': 'backbone.layers.{i}.mixer.up_proj.weight',
  'down': 'backbone.layers.{i}.mixer.down_proj.weight',
  'shared_up': 'backbone.layers.{i}.mixer.shared_experts.up_proj.weight',
  'shared_down': 'backbone.layers.{i}.mixer.shared_experts.down_proj.weight',
  'router': 'backbone.layers.{i}.mixer.gate.weight',
  'router_balance': 'backbone.layers.{i}.mixer.gate.e_score_correction_bias',
  'expert_up': 'backbone.layers.{i}.mixer.experts.{x}.up_proj.weight',
  'expert_down': 'backbone.layers.{i}.mixer.experts.{x}.down_proj.weight',
}  # fmt: skip
_SINGLE = {'mlp': 'feed_forward', 'moe': 'experts'}
_LETTERS = {'M': 'linear_attention', 'E': 'moe', '*': 'full_attention', '-': 'mlp'}


def _read_single(config: Config) -> dict[str, object]:
  types = config.get('layers_block_type') or config.get('layer_types')
  if not types:
    letters = config['hybrid_override_pattern']
    if not set(letters) <= set(_LETTERS):
      raise UserError(f'hybrid_override_pattern={letters!r} must be of {" and ".join(_LETTERS)}')
    types = [_LETTERS[letter] for letter in letters]
  given = {'num_hidden_layers': len(types), 'layer_types': types}
  pattern = read_types(given, lambda _: '', mamba_kinds('full_nope') | _SINGLE)
  return {'NUM_LAYERS': len(types), 'ATTENTION_PATTERN': pattern}


def _write_single(e: LanguageModel) -> JsonObject:
  kinds = {'linear_attention': 'mamba2', 'full_attention': 'full_nope'} | _SINGLE
  types, letters = write_types(e, None, kinds), {kind: x for x, kind in _LETTERS.items()}
  return {
    'layers_block_type': types,
    'hybrid_override_pattern': ''.join(letters[kind] for kind in types),
    'num_hidden_layers': len(types),
  }


# Files have the list or the letters; transformers takes the number of layers from these.
SINGLE_BLOCKS = Both(
  ('layers_block_type', 'layer_types', 'hybrid_override_pattern', 'num_hidden_layers'),
  ('NUM_LAYERS', 'ATTENTION_PATTERN'), _read_single, _write_single,
)  # fmt: skip


def single_block_entries(e: LanguageModel, names: Mapping[str, str]) -> list[Entry]:
  """Returns the entries of a decoder whose blocks have one layer each.

  Args:
    names: Names of the tensors by role; see tensor_names.
  """
  none: LayerEntries = lambda e, name, ours: []
  every = decoder_entries(
    e, names, 'half', {'mamba2': mamba2_entries} | dict.fromkeys(FEED_FORWARD, none)
  )
  absent = tuple(
    f'transformer/{block}/{layer}'
    for block, kind in zip(e.block_names, e.block_kinds, strict=True)
    for layer in (('layer_norm/',) if kind.attention in FEED_FORWARD else ('ff_layer',))
  )
  return [entry for entry in every if not entry.ours.startswith(absent)]


FAMILIES: dict[str, Family] = {
  'nemotron_h': Family(
    'NemotronHForCausalLM', NemotronH,
    (
      *MODEL_COUNTS[1:], SINGLE_BLOCKS, heads('num_key_value_heads', 'head_dim'),
      Same('layer_norm_epsilon', 'LAYERNORM_EPSILON', default=1e-5),
      Same('intermediate_size', 'HIDDEN_DIMS', default=21_504),
      activation(
        'mlp_hidden_act', default='relu2', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')
      ),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False), NO_BIAS,
      OneOf('tie_word_embeddings', False), OneOf('sliding_window', None),
      OneOf('residual_in_fp32', False), OneOf('mamba_proj_bias', False),
      Same('mamba_num_heads', 'MAMBA_HEADS', default=128),
      Same('mamba_head_dim', 'MAMBA_HEAD_DIMS', default=64),
      Same('n_groups', 'MAMBA_GROUPS', default=8),
      Same('ssm_state_size', 'MAMBA_STATE_DIMS', default=128),
      Same('conv_kernel', 'CONVOLUTION_WIDTH', default=4),
      Same('use_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      Same('use_bias', 'USE_STATE_BIAS', default=False),
      Same('time_step_min', 'MAMBA_DT_MIN', default=0.001),
      activation('mamba_hidden_act', default='silu', ours=('MAMBA_ACTIVATION_CLS',)),
      Same('n_routed_experts', 'NUM_EXPERTS', default=8),
      Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN', default=2),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS', default=7688),
      Same('moe_shared_expert_intermediate_size', 'SHARED_EXPERT_HIDDEN_DIMS', default=7688),
      number('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'), NORMALIZED,
      Same('n_group', 'NUM_EXPERT_GROUPS', default=1),
      Same('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', default=1),
      OneOf('n_shared_experts', 1), OneOf('moe_latent_size', None),
      # how weights begin and how transformers computes, and what it does not read
      unread(
        'expand', 'chunk_size', 'time_step_max', 'time_step_floor', 'time_step_limit',
        'rescale_prenorm_residual', 'use_mamba_kernels', 'mamba_ssm_cache_dtype',
        'num_logits_to_keep', 'moe_shared_expert_overlap', 'mtp_layers_block_type',
        'mtp_hybrid_override_pattern', 'rope_theta', 'partial_rotary_factor',
      ),
    ),
    NEMOTRON_H,
    entries=lambda e: single_block_entries(e, NEMOTRON_H),
    classifier=None,
  ),
}  # fmt: skip
