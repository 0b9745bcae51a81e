"""How llama.cpp stores Qwen3.5 and Qwen3-Next; see weights.gguf_architecture."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.qwen.gguf import EXPERTS
from paxlite.experiments.qwen_hybrid import Qwen3_5
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import SILU, SIZES, Architecture
from paxlite.weights.tensor_entries import Entry

_FIELDS = SIZES | {
  'ssm.conv_kernel': 'linear_conv_kernel_dim', 'ssm.state_size': 'linear_key_head_dim',
  'ssm.group_count': 'linear_num_key_heads', 'ssm.time_step_rank': 'linear_num_value_heads',
}  # fmt: skip
_EXPERTS = EXPERTS | {'expert_shared_feed_forward_length': 'shared_expert_intermediate_size'}
_FIXED: Mapping[str, Sequence[Json]] = {
  **SILU, 'mlp_only_layers': ([], None), 'norm_topk_prob': (True,), 'decoder_sparse_step': (1,),
  'rms_norm_eps': (1e-6,),  # it is also that of the norms of queries and keys of delta nets
}  # fmt: skip
_NAMES = {'delta_bias': 'ssm_dt.bias'}
_SAID = ('linear_value_head_dim', 'partial_rotary_factor', 'mtp_use_dedicated_embeddings')
# Variables of delta nets that have heads of values, and the dimension of these heads.
_OF_VALUES = {
  'value/w': 1, 'gate/w': 1, 'beta/w': 1, 'decay_input/w': 1, 'value_convolution/w': 1,
  'post/w': 1, 'decay/log_rate': 0, 'decay/bias': 0,
}  # fmt: skip


class DeltaNetArchitecture(Architecture):
  """Blocks of attention and of gated delta nets, whose keys and values have one width."""

  def own_fields(self, config: Config) -> dict[str, object]:
    kinds, every = config['layer_types'], 'full_attention'
    return {
      'ssm.inner_size': config['linear_value_head_dim'] * config['linear_num_value_heads'],
      'attention.recurrent_layers': [kind == 'linear_attention' for kind in kinds],
      # old versions of llama.cpp read this one alone
      'full_attention_interval': kinds.index(every) + 1 if every in kinds else 4,
      'rope.dimension_count': int(config['head_dim'] * config['partial_rotary_factor']),
    }

  def offset(self, tensor: str) -> float:
    return 0.0 if tensor.endswith('ssm_norm.weight') else super().offset(tensor)

  def refused(self, config: Config) -> JsonObject:
    width = config['linear_value_head_dim']
    return {} if width == config['linear_key_head_dim'] else {'linear_value_head_dim': width}


class Qwen3_5Architecture(DeltaNetArchitecture):
  """Heads of values that read the same keys stand apart, by as many as there are heads of keys."""

  def own_fields(self, config: Config) -> dict[str, object]:
    found = super().own_fields(config)
    pairs = int(config['head_dim'] * config['partial_rotary_factor']) // 2
    # pairs for time, height and width, which are one number in a text
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return found | {'rope.dimension_sections': sections}

  def entries(self, e: LanguageModel) -> list[Entry]:
    assert isinstance(e, Qwen3_5)
    found = []
    for entry in super().entries(e):
      axis = _OF_VALUES.get(entry.ours.rpartition('/self_attention/')[-1])
      if axis is not None and not entry.theirs.endswith('attn_output.weight'):
        entry = _apart(entry, e.DELTA_KEY_HEADS, axis)
      found.append(entry)
    return found


def _apart(entry: Entry, groups: int, axis: int) -> Entry:
  """Returns an entry with heads of groups that stand one after another in the variable alone."""

  def turned(x: np.ndarray, count: int) -> np.ndarray:
    x = x.reshape(entry.our_shape)
    split = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(x.shape)

  heads = entry.our_shape[axis] // groups
  return dataclasses.replace(
    entry,
    to_ours=lambda x: turned(entry.to_ours(x), heads),
    to_theirs=lambda w: entry.to_theirs(turned(w, groups)),
  )


_architecture = functools.partial(
  Qwen3_5Architecture, fixed=_FIXED, norm_offset=1.0, stretchings=(), own_names=_NAMES, said=_SAID
)

ARCHITECTURES = (
  _architecture('qwen3_5_text', 'qwen35', _FIELDS),
  _architecture('qwen3_5_moe_text', 'qwen35moe', _FIELDS | _EXPERTS),
  DeltaNetArchitecture(
    'qwen3_next', 'qwen3next', _FIELDS | _EXPERTS, _FIXED, norm_offset=1.0, stretchings=(),
    own_names=_NAMES | {
      'delta_packed': '', 'delta_joined': 'attn_qkv.weight', 'delta_gate': 'attn_gate.weight',
      'delta_packed_gates': 'ssm_ba.weight',
    },
    said=_SAID,
  ),
)  # fmt: skip
