"""How llama.cpp stores Granite; see weights.gguf_architecture."""

import dataclasses

from paxlite.core.json_text import JsonObject
from paxlite.experiments.granite import GraniteHybrid
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import EXPERTS, PLAIN, SILU, Architecture
from paxlite.weights.tensor_entries import Entry

_FIELDS = PLAIN | {
  'rope.dimension_count': 'head_dim', 'attention.scale': 'attention_multiplier',
  'embedding_scale': 'embedding_multiplier', 'residual_scale': 'residual_multiplier',
  'logit_scale': 'logits_scaling',
}  # fmt: skip
# Gates and ups of Granite 4, which are one tensor in Hugging Face's files.
_SPLIT = {
  'gate_up': '', 'gate': 'ffn_gate.weight', 'up': 'ffn_up.weight', 'down': 'ffn_down.weight',
  'expert_gate_up': '', 'expert_gate': 'ffn_gate_exps.weight', 'expert_up': 'ffn_up_exps.weight',
  'shared_gate_up': '', 'shared_gate': 'ffn_gate_shexp.weight',
  'shared_up': 'ffn_up_shexp.weight', 'shared_down': 'ffn_down_shexp.weight',
}  # fmt: skip


_GRANITE4 = _FIELDS | EXPERTS | {
  'expert_shared_feed_forward_length': 'shared_intermediate_size',
  'ssm.conv_kernel': 'mamba_d_conv', 'ssm.state_size': 'mamba_d_state',
  'ssm.group_count': 'mamba_n_groups', 'ssm.time_step_rank': 'mamba_n_heads',
}  # fmt: skip


class Granite4Architecture(Architecture):
  """Of attention alone, it is a Granite 3 to llama.cpp, and with Mamba 2 a hybrid."""

  @property
  def has_states(self) -> bool:
    return self.name == 'granitehybrid'

  def fits(self, config: Config) -> bool:
    return ('mamba' in config['layer_types']) == self.has_states

  def entries(self, e: LanguageModel) -> list[Entry]:
    assert isinstance(e, GraniteHybrid)
    heads, groups = e.MAMBA_HEADS, e.MAMBA_GROUPS
    shapes = {
      'ssm_a': (heads, 1), 'ssm_d': (heads, 1),
      'ssm_norm.weight': (groups, heads * e.MAMBA_HEAD_DIMS // groups),
    }  # fmt: skip
    of = lambda entry: shapes.get(entry.theirs.split('.', 2)[-1], entry.shape)
    return [dataclasses.replace(entry, shape=of(entry)) for entry in super().entries(e)]

  def own_fields(self, config: Config) -> dict[str, object]:
    heads, kinds = config['num_key_value_heads'], config['layer_types']
    has_rope = config['position_embedding_type'] == 'rope'
    return {
      'attention.head_count_kv': [heads * (kind == 'attention') for kind in kinds],
      # as the converter has it, for models without positions
      'context_length': config['max_position_embeddings'] if has_rope else 2**20,
      'rope.scaling.finetuned': has_rope,  # llama.cpp reads it as just that
      'ssm.inner_size': config['mamba_n_heads'] * config['mamba_d_head'],
    }

  def refused(self, config: Config) -> JsonObject:
    if not self.has_states:
      return {'num_local_experts': n} if (n := config['num_local_experts']) else {}
    limits = config.get('time_step_limit')
    return {} if limits is None else {'time_step_limit': limits}


ARCHITECTURES = (
  Architecture(
    'granite', 'granite', _FIELDS, SILU, 'interleaved', spans_model=True, stretchings=()
  ),
  Granite4Architecture(
    'granitemoehybrid', 'granite', _GRANITE4, {**SILU, 'normalization_function': ('rmsnorm',)},
    'interleaved', spans_model=True, stretchings=(), own_names=_SPLIT,
    said=(
      'position_embedding_type', 'mamba_d_head', 'mamba_expand', 'mamba_conv_bias',
      'mamba_proj_bias', 'time_step_limit',
    ),
  ),
  Granite4Architecture(
    'granitemoehybrid', 'granitehybrid', _GRANITE4,
    {
      **SILU, 'normalization_function': ('rmsnorm',),
      'mamba_expand': (2,), 'mamba_conv_bias': (True,), 'mamba_proj_bias': (False,),
      'mamba_n_groups': (1,),  # llama.cpp has a norm for each group, transformers one for all
    },
    'interleaved', spans_model=True, stretchings=(),
    own_names=_SPLIT | {'mamba_bias': 'ssm_dt.bias'},
    said=('position_embedding_type', 'mamba_d_head', 'time_step_limit'),
  ),
)  # fmt: skip
