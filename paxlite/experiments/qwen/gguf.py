"""How llama.cpp stores Qwen 2 and 3; see weights.gguf_architecture."""

from paxlite.weights.gguf_architecture import SILU, SIZES, Architecture

EXPERTS = {
  'expert_count': 'num_experts', 'expert_used_count': 'num_experts_per_tok',
  'expert_feed_forward_length': 'moe_intermediate_size',
}  # fmt: skip

ARCHITECTURES = (
  Architecture('qwen2', 'qwen2', SIZES, {**SILU, 'use_mrope': (False,)}, spans_model=True),
  Architecture('qwen3', 'qwen3', SIZES, SILU),
  Architecture(
    'qwen3_moe', 'qwen3moe', SIZES | EXPERTS,
    {**SILU, 'norm_topk_prob': (True,), 'decoder_sparse_step': (1,), 'mlp_only_layers': ([],)},
  ),
)  # fmt: skip
