"""What llama.cpp computes for a family, and how a GGUF file stores it.

What llama.cpp computes is read from the package llama-cpp-python 0.3.36: load_arch_hparams and
load_arch_tensors of src/models/NAME.cpp. Fields and tensors are those of its converter.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Config
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.layout import decoder_entries
from paxlite.weights.tensor_entries import Entry

ROPE_FREQS = 'rope_freqs.weight'  # what the rates of rotary positions are divided by
PATTERN = 'attention.sliding_window_pattern'

# Fields without the architecture before them, and keys of config.json.
SIZES = {
  'block_count': 'num_hidden_layers', 'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size', 'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads', 'attention.head_count_kv': 'num_key_value_heads',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps', 'attention.key_length': 'head_dim',
  'attention.value_length': 'head_dim', 'rope.dimension_count': 'head_dim',
  'vocab_size': 'vocab_size', 'rope.freq_base': 'rope_theta',
}  # fmt: skip
_HEADS = ('attention.key_length', 'attention.value_length', 'rope.dimension_count')
PLAIN = {k: v for k, v in SIZES.items() if k not in _HEADS}
EXPERTS = {'expert_count': 'num_local_experts', 'expert_used_count': 'num_experts_per_tok'}
WINDOW = {'attention.sliding_window': 'sliding_window'}
# Keys without a field, with the values for which llama.cpp computes the same.
SILU: Mapping[str, Sequence[Json]] = {
  'hidden_act': ('silu',), 'attention_bias': (False,), 'mlp_bias': (False,),
  'rope_interleaved': (False,), 'use_sliding_window': (False,), 'sliding_window': (None,),
}  # fmt: skip
# Roles of tensors that no file has: of gates and ups in turn, and of further tokens.
_LEFT_OUT = 'experts_gate_up', 'experts_down', 'prediction_'


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A family as llama.cpp has it."""

  kind: str  # the family, as in FAMILIES
  name: str  # llama.cpp's name of the architecture
  # its fields, without the name before them, with the keys of config.json
  fields: Mapping[str, str]
  # the keys of config.json that have no field, or whose field llama.cpp does not read everywhere,
  # with the values that it means
  fixed: Mapping[str, Sequence[Json]]
  rotary: str = 'half'  # layout of the rotary pairs in its queries and keys; see RotaryEmbedding
  norm_offset: float = 0.0  # what the file adds to the scales of norms
  spans_model: bool = False  # whether the heads together must be as wide as the model
  # the kinds of stretched rotary positions that it computes
  stretchings: Sequence[str] = ('linear', 'yarn')
  # the number of layers with which scores are scaled by the width of the model over the number of
  # heads, and not by the width of a head
  scaled_layers: int = 0
  # names of tensors by role that the package gguf does not tell; '': there is none
  own_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # the keys of config.json that its tensors say, or fields that it makes itself
  said: Sequence[str] = ()
  # special tokens that are part of what llama.cpp writes, where its tokenizer is `gemma4`; None: it
  # is `llama`
  shown: Sequence[str] | None = None

  @property
  def names(self) -> dict[str, str]:
    """The names of its tensors by role, as in tensor_names."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

    number = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}.get(self.name)
    if number is None:
      raise UserError(f'the package gguf does not know {self.name}: install a newer one')
    assert isinstance(number, MODEL_ARCH)
    known = get_tensor_name_map(number, 1)
    found = {}
    for role, text in FAMILIES[self.kind].names.items():
      first = text.replace('{i}', '0').replace('.{x}', '')  # all experts are one tensor
      if name := known.get_name(first, try_suffixes=('.weight', '.bias')):
        found[role] = name.replace('blk.0.', 'blk.{i}.')
    found = {role: name for role, name in found.items() if not role.startswith(_LEFT_OUT)}
    found |= {role: f'blk.{{i}}.{name}' for role, name in self.own_names.items()}
    return {role: name for role, name in found.items() if self.own_names.get(role) != ''}

  def fits(self, config: Config) -> bool:
    """Returns whether the model of a config.json of the kind has this architecture."""
    return True

  def entries(self, e: LanguageModel) -> list[Entry]:
    """Returns the entries of the tensors of an experiment."""
    entries = decoder_entries(e, self.names, self.rotary, FAMILIES[self.kind].layers)
    return [stored_entry(entry) for entry in entries]

  def offset(self, tensor: str) -> float:
    """Returns what the file adds to the elements of a tensor."""
    return self.norm_offset if tensor.endswith('norm.weight') else 0.0

  def scale_width(self, config: Config) -> Json:
    """Returns query_pre_attn_scalar as llama.cpp computes it."""
    if config['num_hidden_layers'] == self.scaled_layers:
      return config['hidden_size'] // config['num_attention_heads']
    return config['head_dim']

  def own_fields(self, config: Config) -> dict[str, object]:
    """Returns fields that are more than the value of a key; they replace those of `fields`."""
    if 'layer_types' not in config:
      return {}
    return {PATTERN: [kind == 'sliding_attention' for kind in config['layer_types']]}

  def refused(self, config: Config) -> JsonObject:
    """Returns keys, beside `fixed`, with values for which llama.cpp computes something else."""
    return {}

  def constants(self, config: Config) -> dict[str, np.ndarray]:
    """Returns the tensors that are no weights, float32.

    Rates of rotary positions are divided by rope_freqs. The formula is that of
    layers.rotary.Llama3RotaryEmbedding.
    """
    rope = config.get('rope_scaling') or {}
    if rope.get('rope_type') != 'llama3':
      return {}
    half = config['head_dim'] // 2
    rates = float(config['rope_theta']) ** -(np.arange(half) / half)
    turns = rope['original_max_position_embeddings'] * rates / (2 * math.pi)
    low, high = rope['low_freq_factor'], rope['high_freq_factor']
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return {ROPE_FREQS: (1 / (kept + (1 - kept) / rope['factor'])).astype(np.float32)}


def stored_entry(entry: Entry) -> Entry:
  """Returns an entry with the shape and the elements that a file has.

  Convolutions lose a dimension of 1. Rates of decay are -exp of the logarithms elsewhere.
  """
  if 'conv' in entry.theirs and len(entry.shape) == 3:
    entry = dataclasses.replace(entry, shape=(entry.shape[0], entry.shape[-1]))
  if not entry.theirs.endswith('ssm_a'):
    return entry
  to_ours, to_theirs = entry.to_ours, entry.to_theirs
  return dataclasses.replace(
    entry,
    to_ours=lambda x: np.log(-to_ours(x)),
    to_theirs=lambda w: -np.exp(to_theirs(w).astype(np.float32)),
  )
