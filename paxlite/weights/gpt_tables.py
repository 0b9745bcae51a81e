"""The published families of GPT-2's descendants; see family_tables."""

from paxlite.experiments.gpt_bigcode import GPTBigCode
from paxlite.experiments.gpt_neo import GPTNeo
from paxlite.experiments.gptj import GPTJ
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Same, activation, positions
from paxlite.weights.family import Family
from paxlite.weights.family_keys import TIED, UNTIED, only, unread
from paxlite.weights.gpt_keys import NEO_LAYERS, ROTARY_DIM, gpt_sizes, hidden_dims

GPT_FAMILIES: dict[str, Family] = {
  'gpt_bigcode': Family(
    'GPTBigCodeForCausalLM', GPTBigCode,
    (
      *gpt_sizes('gelu_pytorch_tanh'), TIED, OneOf('multi_query', True),
      OneOf('scale_attn_weights', True),
      only('num_key_value_heads', 1),
      # the softmax is in float32 whatever these say, and the last ones are about programs
      unread(
        'attention_softmax_in_fp32', 'scale_attention_softmax_in_fp32', 'inference_runner',
        'max_batch_size', 'n_ctx', 'pad_key_length', 'pre_allocate_kv_cache',
        'runner_max_sequence_length', 'validate_runner_input', 'gradient_checkpointing',
      ),
    ),
    tensor_names.GPT_BIGCODE,
  ),
  'gpt_neo': Family(
    'GPTNeoForCausalLM', GPTNeo,
    (
      Same('num_layers', 'NUM_LAYERS'), Same('num_heads', 'NUM_HEADS'),
      Same('hidden_size', 'MODEL_DIMS'), Same('vocab_size', 'VOCAB_SIZE'),
      Same('layer_norm_epsilon', 'LAYERNORM_EPSILON'), positions('max_position_embeddings'),
      activation('activation_function', written='gelu_new'),
      hidden_dims('intermediate_size', of='hidden_size'), TIED, NEO_LAYERS,
      unread('embed_dropout', 'resid_dropout', 'gradient_checkpointing'),
    ),
    tensor_names.GPT_NEO,
  ),
  'gptj': Family(
    'GPTJForCausalLM', GPTJ,
    (
      *gpt_sizes(), UNTIED, ROTARY_DIM, only('rotary', True), only('scale_attn_weights', True),
      unread('gradient_checkpointing', 'n_ctx'),
    ),
    tensor_names.GPTJ, rotary='interleaved',
  ),
}  # fmt: skip
