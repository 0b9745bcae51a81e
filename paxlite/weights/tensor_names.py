"""Names of the tensors of published models, by role.

{i} is the number of a block, {x} that of an expert. Weights are [out, in]. A bias has the name of
its weight, with another end. A family without a role has no tensor of that kind.
"""

HUGGING_FACE = {
  'embedding': 'model.embed_tokens.weight', 'final_norm': 'model.norm.weight',
  'head': 'lm_head.weight', 'attention_norm': 'model.layers.{i}.input_layernorm.weight',
  'ffn_norm': 'model.layers.{i}.post_attention_layernorm.weight',
  'query': 'model.layers.{i}.self_attn.q_proj.weight',
  'key': 'model.layers.{i}.self_attn.k_proj.weight',
  'value': 'model.layers.{i}.self_attn.v_proj.weight',
  'post': 'model.layers.{i}.self_attn.o_proj.weight',
  'gate': 'model.layers.{i}.mlp.gate_proj.weight', 'up': 'model.layers.{i}.mlp.up_proj.weight',
  'down': 'model.layers.{i}.mlp.down_proj.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_norm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_norm.weight',
  'router': 'model.layers.{i}.mlp.gate.weight',
  'expert_gate': 'model.layers.{i}.mlp.experts.{x}.gate_proj.weight',
  'expert_up': 'model.layers.{i}.mlp.experts.{x}.up_proj.weight',
  'expert_down': 'model.layers.{i}.mlp.experts.{x}.down_proj.weight',
}  # fmt: skip

MIXTRAL = HUGGING_FACE | {
  'router': 'model.layers.{i}.block_sparse_moe.gate.weight',
  'expert_gate': 'model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight',
  'expert_up': 'model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight',
}
OLMO2 = HUGGING_FACE | {
  'attention_post_norm': 'model.layers.{i}.post_attention_layernorm.weight',
  'ffn_post_norm': 'model.layers.{i}.post_feedforward_layernorm.weight',
}
GEMMA2 = OLMO2 | {'ffn_norm': 'model.layers.{i}.pre_feedforward_layernorm.weight'}
# A router whose bias balances the load, and experts that see every token.
SHARED_EXPERTS = HUGGING_FACE | {
  'router_balance': 'model.layers.{i}.mlp.gate.e_score_correction_bias',
  'shared_gate': 'model.layers.{i}.mlp.shared_experts.gate_proj.weight',
  'shared_up': 'model.layers.{i}.mlp.shared_experts.up_proj.weight',
  'shared_down': 'model.layers.{i}.mlp.shared_experts.down_proj.weight',
}
# Modules that predict further tokens have the numbers behind those of the blocks. Two of their
# tensors are copies. Where a format has no names for them, an export leaves them out.
PREDICTIONS = {
  'prediction_embedding_norm': 'model.layers.{i}.enorm.weight',
  'prediction_hidden_norm': 'model.layers.{i}.hnorm.weight',
  'prediction_projection': 'model.layers.{i}.eh_proj.weight',
  'prediction_norm': 'model.layers.{i}.shared_head.norm.weight',
  'prediction_embedding': 'model.layers.{i}.embed_tokens.weight',
  'prediction_head': 'model.layers.{i}.shared_head.head.weight',
}

MAMBA2 = {
  'mamba_in': 'model.layers.{i}.mamba.in_proj.weight',
  'mamba_convolution': 'model.layers.{i}.mamba.conv1d.weight',
  'mamba_rate': 'model.layers.{i}.mamba.A_log', 'mamba_bias': 'model.layers.{i}.mamba.dt_bias',
  'mamba_skip': 'model.layers.{i}.mamba.D', 'mamba_norm': 'model.layers.{i}.mamba.norm.weight',
  'mamba_post': 'model.layers.{i}.mamba.out_proj.weight',
}  # fmt: skip

META = {
  'embedding': 'tok_embeddings.weight', 'final_norm': 'norm.weight', 'head': 'output.weight',
  'attention_norm': 'layers.{i}.attention_norm.weight', 'ffn_norm': 'layers.{i}.ffn_norm.weight',
  'query': 'layers.{i}.attention.wq.weight', 'key': 'layers.{i}.attention.wk.weight',
  'value': 'layers.{i}.attention.wv.weight', 'post': 'layers.{i}.attention.wo.weight',
  'gate': 'layers.{i}.feed_forward.w1.weight', 'up': 'layers.{i}.feed_forward.w3.weight',
  'down': 'layers.{i}.feed_forward.w2.weight',
}  # fmt: skip
