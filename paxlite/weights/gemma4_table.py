"""The published family Gemma 4; see family_tables."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.gemma4 import Gemma4
from paxlite.weights.config_keys import Cap, OneOf, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GIVEN_HEADS, NO_BIAS, TIED
from paxlite.weights.gemma4_keys import (
  GEMMA4_EXPERTS,
  GEMMA4_ROPE,
  GEMMA4_SMALL,
  GEMMA4_TYPES,
  GEMMA4_WIDTHS,
)
from paxlite.weights.gemma4_layout import GEMMA4, gemma4_entries, unread_by_gemma4

# What text_config of models with images leaves out, because these are transformers' defaults.
GEMMA4_DEFAULTS: JsonObject = dict(
  model_type='gemma4_text', vocab_size=262_144, hidden_size=2304, intermediate_size=9216,
  num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
  max_position_embeddings=131_072, rms_norm_eps=1e-6, sliding_window=512,
)  # fmt: skip

GEMMA4_FAMILIES: dict[str, Family] = {
  'gemma4_text': Family(
    'Gemma4ForCausalLM', Gemma4,
    (
      *GIVEN_HEADS, TIED, NO_BIAS, GEMMA4_TYPES, GEMMA4_WIDTHS, GEMMA4_ROPE, GEMMA4_EXPERTS,
      GEMMA4_SMALL,
      activation(
        'hidden_activation', default='gelu_pytorch_tanh',
        ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS'),
      ),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', is_required=False),
      # tokens of images, which see each other there, are not in a text
      OneOf('use_bidirectional_attention', None, False, 'vision'),
    ),
    GEMMA4,
    entries=gemma4_entries,
    unread=unread_by_gemma4,
  ),
}  # fmt: skip
