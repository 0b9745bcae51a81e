"""The families that llama.cpp knows, too: the keys of config.json, and the fields of a GGUF file.

What llama.cpp computes for each architecture is read from the package llama-cpp-python 0.3.36:
load_arch_hparams and load_arch_tensors of src/models/NAME.cpp. Fields and tensors of GLM,
Granite, gpt-oss and LFM2 are those of its converter.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Config
from paxlite.weights.families import config_json, family_of
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.known_keys import HARMLESS
from paxlite.weights.layout import decoder_entries
from paxlite.weights.tensor_entries import Entry

_CONVOLUTION = 'shortconv.conv.weight'
ROPE_FREQS = 'rope_freqs.weight'  # what llama3 divides the rates of rotary positions by
PATTERN = 'attention.sliding_window_pattern'

# Fields without the architecture before them, and keys of config.json.
_SIZES = {
  'block_count': 'num_hidden_layers',
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'attention.key_length': 'head_dim',
  'attention.value_length': 'head_dim',
  'rope.dimension_count': 'head_dim',
  'vocab_size': 'vocab_size',
  'rope.freq_base': 'rope_theta',
}
_EXPERTS = {'expert_count': 'num_local_experts', 'expert_used_count': 'num_experts_per_tok'}
_WINDOW = {'attention.sliding_window': 'sliding_window'}
_CAP = {'final_logit_softcapping': 'final_logit_softcapping'}
# Keys without a field, with the values for which llama.cpp computes the same.
_SILU: Mapping[str, Sequence[Json]] = {
  'hidden_act': ('silu',), 'attention_bias': (False,), 'mlp_bias': (False,),
  'rope_interleaved': (False,), 'use_sliding_window': (False,), 'sliding_window': (None,),
}  # fmt: skip
_GELU: Mapping[str, Sequence[Json]] = {
  'hidden_act': ('gelu_pytorch_tanh',), 'hidden_activation': ('gelu_pytorch_tanh', None),
  'attention_bias': (False,), 'use_bidirectional_attention': (False,),
  'attn_logit_softcapping': (None,),
}  # fmt: skip
_LLAMA = 'linear', 'yarn', 'llama3'
_HEADS = ('attention.key_length', 'attention.value_length', 'rope.dimension_count')
_PLAIN = {k: v for k, v in _SIZES.items() if k not in _HEADS}
_TIED: Mapping[str, Sequence[Json]] = {'tie_word_embeddings': (True,)}


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A family as llama.cpp has it.

  Attributes:
    kind: The family, as in FAMILIES.
    name: llama.cpp's name of the architecture.
    fields: Its fields, without the name before them, with the keys of config.json.
    fixed: The keys of config.json that have no field, with the values that llama.cpp means.
    rotary: Layout of the rotary pairs in its queries and keys; see RotaryEmbedding.
    norm_offset: What the file adds to the scales of norms.
    spans_model: Whether the heads together must be as wide as the model.
    stretchings: The kinds of stretched rotary positions that it computes.
    scaled_layers: The number of layers with which scores are scaled by the width of the model over
      the number of heads, and not by the width of a head.
    own_names: Names of tensors by role that the package gguf does not tell.
  """

  kind: str
  name: str
  fields: Mapping[str, str]
  fixed: Mapping[str, Sequence[Json]]
  rotary: str = 'half'
  norm_offset: float = 0.0
  spans_model: bool = False
  stretchings: Sequence[str] = ('linear', 'yarn')
  scaled_layers: int = 0
  own_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def names(self) -> dict[str, str]:
    """The names of its tensors by role, as in tensor_names."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

    number = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}[self.name]
    assert isinstance(number, MODEL_ARCH)
    known = get_tensor_name_map(number, 1)
    found = {}
    for role, text in FAMILIES[self.kind].names.items():
      first = text.replace('{i}', '0').replace('.{x}', '')  # all experts are one tensor
      if name := known.get_name(first, try_suffixes=('.weight', '.bias')):
        found[role] = name.replace('blk.0.', 'blk.{i}.')
    # experts are a tensor each of gates and ups, and further tokens are left out
    elsewhere = 'experts_', 'prediction_'
    found = {role: name for role, name in found.items() if not role.startswith(elsewhere)}
    return found | {role: f'blk.{{i}}.{name}' for role, name in self.own_names.items()}

  def entries(self, e: LanguageModel) -> list[Entry]:
    """Returns the entries of the tensors of an experiment."""
    entries = decoder_entries(e, self.names, self.rotary, FAMILIES[self.kind].layers)
    flat = lambda shape: (shape[0], shape[-1])  # convolutions have a dimension of 1 elsewhere
    return [
      dataclasses.replace(entry, shape=flat(entry.shape)) if _CONVOLUTION in entry.theirs else entry
      for entry in entries
    ]

  def offset(self, tensor: str) -> float:
    """Returns what the file adds to the elements of a tensor."""
    return self.norm_offset if tensor.endswith('norm.weight') else 0.0

  def scale_width(self, config: Config) -> Json:
    """Returns query_pre_attn_scalar as llama.cpp computes it."""
    if config['num_hidden_layers'] == self.scaled_layers:
      return config['hidden_size'] // config['num_attention_heads']
    return config['head_dim']


ARCHITECTURES = (
  Architecture('llama', 'llama', _SIZES, _SILU, 'interleaved', stretchings=_LLAMA),
  Architecture('mistral', 'llama', _SIZES, _SILU, 'interleaved', stretchings=_LLAMA),
  Architecture('mixtral', 'llama', _SIZES | _EXPERTS, _SILU, 'interleaved'),
  Architecture('qwen2', 'qwen2', _SIZES, {**_SILU, 'use_mrope': (False,)}, spans_model=True),
  Architecture('qwen3', 'qwen3', _SIZES, _SILU),
  Architecture(
    'qwen3_moe', 'qwen3moe',
    _SIZES | {
      'expert_count': 'num_experts', 'expert_used_count': 'num_experts_per_tok',
      'expert_feed_forward_length': 'moe_intermediate_size',
    },
    {**_SILU, 'norm_topk_prob': (True,), 'decoder_sparse_step': (1,), 'mlp_only_layers': ([],)},
  ),
  Architecture(
    'gemma', 'gemma', _SIZES, {**_GELU, **_TIED}, norm_offset=1.0,
    stretchings=('linear',)
  ),
  Architecture(
    'gemma2', 'gemma2',
    _SIZES | _WINDOW | _CAP | {'attn_logit_softcapping': 'attn_logit_softcapping'},
    {k: v for k, v in {**_GELU, **_TIED}.items() if k != 'attn_logit_softcapping'},
    norm_offset=1.0, stretchings=('linear',), scaled_layers=46,
  ),
  Architecture(
    'gemma3_text', 'gemma3',
    _SIZES | _WINDOW | _CAP | {'rope.freq_base_swa': 'rope_local_base_freq'},
    _GELU, norm_offset=1.0, stretchings=('linear',), scaled_layers=62,
  ),
  Architecture(
    'phi3', 'phi3', _SIZES,
    {
      **_SILU, 'lm_head_bias': (False,), 'full_attn_mod': (1,), 'interpolate_factor': (1,),
      'partial_rotary_factor': (1.0,),
    },
    spans_model=True,
  ),
  Architecture(
    'olmo2', 'olmo2', _SIZES, {**_SILU, 'tie_word_embeddings': (False,)}, spans_model=True
  ),
  Architecture(
    'granite', 'granite',
    _PLAIN | {
      'rope.dimension_count': 'head_dim', 'attention.scale': 'attention_multiplier',
      'embedding_scale': 'embedding_multiplier', 'residual_scale': 'residual_multiplier',
      'logit_scale': 'logits_scaling',
    },
    _SILU, 'interleaved', spans_model=True, stretchings=(),
  ),
  Architecture(
    'glm4', 'glm4', _SIZES,
    {'hidden_act': ('silu',), 'attention_bias': (True, False), 'partial_rotary_factor': (0.5,)},
    'interleaved', stretchings=(),
  ),
  Architecture(
    'glm4_moe', 'glm4moe',
    _SIZES | {
      'expert_count': 'n_routed_experts', 'expert_used_count': 'num_experts_per_tok',
      'expert_feed_forward_length': 'moe_intermediate_size',
      'expert_shared_count': 'n_shared_experts', 'expert_weights_norm': 'norm_topk_prob',
      'leading_dense_block_count': 'first_k_dense_replace',
      'expert_weights_scale': 'routed_scaling_factor',
    },
    {
      'hidden_act': ('silu',), 'attention_bias': (True, False), 'use_qk_norm': (True, False),
      'partial_rotary_factor': (0.5,), 'n_group': (1,), 'topk_group': (1,),
    },
    stretchings=(), own_names={'router_balance': 'exp_probs_b.bias'},
  ),
  Architecture(
    'lfm2', 'lfm2',
    {k: v for k, v in _PLAIN.items() if v != 'rms_norm_eps'} | {
      'attention.layer_norm_rms_epsilon': 'norm_eps', 'shortconv.l_cache': 'conv_L_cache',
    },
    {
      'conv_bias': (False,), 'block_auto_adjust_ff_dim': (False,), 'use_pos_enc': (True,),
      'block_use_swiglu': (True,),
    },
    spans_model=True, stretchings=(),
  ),
  Architecture(
    'gpt_oss', 'gpt-oss',
    _SIZES | _EXPERTS | _WINDOW | {'expert_feed_forward_length': 'intermediate_size'},
    {
      'hidden_act': ('silu',), 'attention_bias': (True,), 'tie_word_embeddings': (False,),
      'swiglu_limit': (7.0,), 'swiglu_alpha': (1.702,),
    },
    stretchings=('yarn',),
    own_names={
      'sinks': 'attn_sinks.weight', 'expert_gate_bias': 'ffn_gate_exps.bias',
      'expert_up_bias': 'ffn_up_exps.bias', 'expert_down_bias': 'ffn_down_exps.bias',
    },
  ),
)  # fmt: skip
# Keys that fields and tensors say in another way.
_SAID = {
  'tie_word_embeddings', 'rope_scaling', 'layer_types', 'query_pre_attn_scalar',
  'num_nextn_predict_layers',  # they are left out
}  # fmt: skip


def architecture_of(e: LanguageModel) -> tuple[Architecture, JsonObject]:
  """Returns the architecture of an experiment's model, and its config.json.

  Raises:
    UserError: llama.cpp has no such model, or computes something else for it.
  """
  kind = family_of(e)
  found = next((a for a in ARCHITECTURES if a.kind == kind), None)
  if found is None or e.gives_rewards:
    what = 'reward models' if e.gives_rewards else f'the family {kind}'
    known = ', '.join(a.kind for a in ARCHITECTURES)
    raise UserError(f'there is no export of {what} to GGUF: --to=hf writes it; GGUF has {known}')
  config = config_json(e, 'float32', None)
  window = config.get('sliding_window')
  if 'sliding_window' in found.fixed and window and window >= config['max_position_embeddings']:
    config['sliding_window'] = None  # no text is longer than the window
  if wrong := _unknown(found, config):
    key, value = next(iter(wrong.items()))
    raise UserError(
      f'llama.cpp has no {kind} with {key}={value!r} of config.json: --to=hf exports it'
    )
  return found, config


def _unknown(architecture: Architecture, config: Config) -> dict[str, Json]:
  """Returns keys of a config.json with values that llama.cpp does not have."""
  read = {*architecture.fields.values(), *architecture.fixed, *_SAID, *HARMLESS}
  found = {k: v for k, v in config.items() if k not in read}
  for key, values in architecture.fixed.items():
    if key in config and config[key] not in values:
      found[key] = config[key]
  if architecture.kind == 'gemma2':  # it divides by both
    found |= {k: config[k] for k in config if k.endswith('_softcapping') and config[k] is None}
  if architecture.kind == 'gpt_oss':  # every second block has full attention
    types = ['sliding_attention', 'full_attention'] * config['num_hidden_layers']
    if config['layer_types'] != types[: config['num_hidden_layers']]:
      found['layer_types'] = config['layer_types']
  heads = config['num_attention_heads'] * config['head_dim']
  if architecture.spans_model:
    found.pop('head_dim', None)
    if heads != config['hidden_size']:
      found['head_dim'] = config['head_dim']
  width = config.get('query_pre_attn_scalar')
  if width is not None and width != architecture.scale_width(config):
    found['query_pre_attn_scalar'] = width
  rope = config.get('rope_scaling') or {}
  kind = rope.get('rope_type', 'default')
  # llama.cpp always truncates; its files of gpt-oss are published so, and differ by a little
  truncates = kind == 'yarn' and (rope['truncate'] or architecture.kind == 'gpt_oss')
  of_yarn = truncates and not rope.get('attention_factor')
  if kind not in ('default', *architecture.stretchings) or (kind == 'yarn' and not of_yarn):
    found['rope_scaling'] = rope
  return found


def model_fields(architecture: Architecture, config: Config) -> dict[str, object]:
  """Returns the fields of a model, with the name of the architecture before them."""
  found: dict[str, object] = {
    name: config[key] for name, key in architecture.fields.items() if config.get(key) is not None
  }
  for name in ('rope.freq_base', 'rope.freq_base_swa', 'attn_logit_softcapping'):
    if name in found:
      found[name] = float(config[architecture.fields[name]])
  if (share := config.get('partial_rotary_factor', 1.0)) != 1:
    found['rope.dimension_count'] = int(config['head_dim'] * share)
  if architecture.kind == 'glm4_moe':
    found['expert_gating_func'] = 2  # sigmoids
    found['expert_weights_scale'] = float(config['routed_scaling_factor'])
  if architecture.kind == 'lfm2':
    groups = config['num_key_value_heads']
    found['attention.head_count_kv'] = [
      groups * (kind == 'full_attention') for kind in config['layer_types']
    ]
  elif 'layer_types' in config and architecture.kind != 'gpt_oss':
    found[PATTERN] = [kind == 'sliding_attention' for kind in config['layer_types']]
  found |= _stretching_fields(config)
  return {f'{architecture.name}.{name}': value for name, value in found.items()}


def _stretching_fields(config: Config) -> dict[str, object]:
  """Returns the fields of stretched rotary positions; those of llama3 are a tensor."""
  rope = config.get('rope_scaling') or {}
  kind = rope.get('rope_type', 'default')
  before = 'rope.scaling'
  if kind == 'default':
    return {}
  if kind == 'llama3':
    return {f'{before}.original_context_length': rope['original_max_position_embeddings']}
  if kind == 'linear':
    return {f'{before}.type': kind, f'{before}.factor': float(rope['factor'])}
  return {
    f'{before}.type': kind,
    f'{before}.factor': float(rope['factor']),
    f'{before}.original_context_length': rope['original_max_position_embeddings'],
    f'{before}.yarn_beta_fast': float(rope['beta_fast']),
    f'{before}.yarn_beta_slow': float(rope['beta_slow']),
  }


def rope_freqs(config: Config) -> np.ndarray | None:
  """Returns what the rates of rotary positions are divided by, float32 [H / 2], for llama3.

  The formula is that of layers.rotary.Llama3RotaryEmbedding. None: there is no such tensor.
  """
  rope = config.get('rope_scaling') or {}
  if rope.get('rope_type') != 'llama3':
    return None
  half = config['head_dim'] // 2
  rates = float(config['rope_theta']) ** -(np.arange(half) / half)
  turns = rope['original_max_position_embeddings'] * rates / (2 * math.pi)
  low, high = rope['low_freq_factor'], rope['high_freq_factor']
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return (1 / (kept + (1 - kept) / rope['factor'])).astype(np.float32)
