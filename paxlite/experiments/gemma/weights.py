"""How the published models of Gemma are stored; see weights.family."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.gemma import Gemma, Gemma2, Gemma3
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Cap, OneOf, Same, activation, layer_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GIVEN_HEADS, NO_BIAS, TIED
from paxlite.weights.rope_keys import rope

GEMMA = (*GIVEN_HEADS, TIED, NO_BIAS, OneOf('use_bidirectional_attention', False))
GELU = activation('hidden_activation', 'hidden_act', default='gelu_pytorch_tanh')
GEMMA2 = (*GEMMA, GELU, Same('query_pre_attn_scalar', 'QUERY_PRE_ATTN_SCALAR'))
# What text_config of models with images leaves out, because these are transformers' defaults.
TEXT_DEFAULTS: dict[str, JsonObject] = {
  'gemma3': dict(
    model_type='gemma3_text', vocab_size=262_208, hidden_size=2304, intermediate_size=9216,
    num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
    max_position_embeddings=131_072, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
    query_pre_attn_scalar=256, sliding_window=4096,
  ),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
  'gemma': Family(
    'GemmaForCausalLM', Gemma,
    (
      *GEMMA, rope(),
      # old files say gelu, and mean this too
      OneOf('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
      OneOf('hidden_activation', 'gelu_pytorch_tanh', None),
    ),
  ),
  'gemma2': Family(
    'Gemma2ForCausalLM', Gemma2,
    (
      *GEMMA2, rope(), layer_types(['sliding', 'full'], 'sliding_window_size'),
      Cap('attn_logit_softcapping', 'ATTEN_LOGIT_CAP'),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS'),
    ),
    tensor_names.GEMMA2,
  ),
  'gemma3_text': Family(
    'Gemma3ForCausalLM', Gemma3,
    (
      *GEMMA2, rope('rope_local_base_freq', theta=1e6, local_theta=1e4),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', is_required=False),
      layer_types([*['sliding'] * 5, 'full'], 'sliding_window_pattern'),
      OneOf('attn_logit_softcapping', None),  # which transformers ignores
    ),
    tensor_names.GEMMA2,
    classifier='Gemma3TextForSequenceClassification',
  ),
}  # fmt: skip
