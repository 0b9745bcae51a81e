"""How llama.cpp stores gpt-oss; see weights.gguf_architecture."""

from paxlite.core.json_text import JsonObject
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import EXPERTS, SIZES, WINDOW, Architecture


class GptOssArchitecture(Architecture):
  """In llama.cpp, every second block has full attention."""

  def own_fields(self, config: Config) -> dict[str, object]:
    return {}

  def refused(self, config: Config) -> JsonObject:
    types = ['sliding_attention', 'full_attention'] * config['num_hidden_layers']
    is_known = config['layer_types'] == types[: config['num_hidden_layers']]
    return {} if is_known else {'layer_types': config['layer_types']}


ARCHITECTURES = (
  GptOssArchitecture(
    'gpt_oss', 'gpt-oss',
    SIZES | EXPERTS | WINDOW | {'expert_feed_forward_length': 'intermediate_size'},
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
