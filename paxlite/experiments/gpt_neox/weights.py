"""How the published models of GPT-NeoX are stored; see weights.family."""

from paxlite.experiments.gpt_neox import GPTNeoX
from paxlite.weights.config_keys import Same, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import LAYER_NORM_LENGTHS, UNTIED, choice
from paxlite.weights.rope_keys import rope

# Of each head, its queries, keys and values stand together.
GPT_NEOX = {
  'embedding': 'gpt_neox.embed_in.weight', 'final_norm': 'gpt_neox.final_layer_norm.weight',
  'head': 'embed_out.weight', 'attention_norm': 'gpt_neox.layers.{i}.input_layernorm.weight',
  'ffn_norm': 'gpt_neox.layers.{i}.post_attention_layernorm.weight',
  'heads': 'gpt_neox.layers.{i}.attention.query_key_value.weight',
  'post': 'gpt_neox.layers.{i}.attention.dense.weight',
  'up': 'gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight',
  'down': 'gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight',
}  # fmt: skip

FAMILIES: dict[str, Family] = {
  'gpt_neox': Family(
    'GPTNeoXForCausalLM', GPTNeoX,
    (
      *LAYER_NORM_LENGTHS, Same('num_attention_heads', 'NUM_HEADS'),
      Same('hidden_size', 'MODEL_DIMS'), activation('hidden_act'), UNTIED,
      rope(fraction=0.25, names=('rotary_emb_base', 'rotary_pct')),
      Same('attention_bias', 'USE_BIAS', default=True),
      choice('use_parallel_residual', 'BLOCK_ORDER', 'sequential', 'parallel', default=True),
    ),
    GPT_NEOX,
  ),
}  # fmt: skip
