"""Names of the tensors of published models, by role.

{i} is the number of a block, {x} that of an expert. Weights are [out, in]. A bias has the name of
its weight, with another end. A family without a role has no tensor of that kind.
"""

HUGGING_FACE = {
  'embedding': 'model.embed_tokens.weight',
  'final_norm': 'model.norm.weight',
  'head': 'lm_head.weight',
  'attention_norm': 'model.layers.{i}.input_layernorm.weight',
  'ffn_norm': 'model.layers.{i}.post_attention_layernorm.weight',
  'query': 'model.layers.{i}.self_attn.q_proj.weight',
  'key': 'model.layers.{i}.self_attn.k_proj.weight',
  'value': 'model.layers.{i}.self_attn.v_proj.weight',
  'post': 'model.layers.{i}.self_attn.o_proj.weight',
  'gate': 'model.layers.{i}.mlp.gate_proj.weight',
  'up': 'model.layers.{i}.mlp.up_proj.weight',
  'down': 'model.layers.{i}.mlp.down_proj.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_norm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_norm.weight',
  'router': 'model.layers.{i}.mlp.gate.weight',
  'expert_gate': 'model.layers.{i}.mlp.experts.{x}.gate_proj.weight',
  'expert_up': 'model.layers.{i}.mlp.experts.{x}.up_proj.weight',
  'expert_down': 'model.layers.{i}.mlp.experts.{x}.down_proj.weight',
}

MIXTRAL = HUGGING_FACE | {
  'router': 'model.layers.{i}.block_sparse_moe.gate.weight',
  'expert_gate': 'model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight',
  'expert_up': 'model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight',
}
MINIMAX_M2 = MIXTRAL | {
  'router_balance': 'model.layers.{i}.block_sparse_moe.e_score_correction_bias',
}
OLMO2 = HUGGING_FACE | {
  'attention_post_norm': 'model.layers.{i}.post_attention_layernorm.weight',
  'ffn_post_norm': 'model.layers.{i}.post_feedforward_layernorm.weight',
}
GEMMA2 = OLMO2 | {'ffn_norm': 'model.layers.{i}.pre_feedforward_layernorm.weight'}
PHI3 = HUGGING_FACE | {
  'query_key_value': 'model.layers.{i}.self_attn.qkv_proj.weight',
  'gate_up': 'model.layers.{i}.mlp.gate_up_proj.weight',
}
GLM4 = OLMO2 | {
  'attention_post_norm': 'model.layers.{i}.post_self_attn_layernorm.weight',
  'ffn_post_norm': 'model.layers.{i}.post_mlp_layernorm.weight',
  'gate_up': PHI3['gate_up'],
}
HUNYUAN = HUGGING_FACE | {
  'query_norm': 'model.layers.{i}.self_attn.query_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.key_layernorm.weight',
}
PHI = HUGGING_FACE | {
  'final_norm': 'model.final_layernorm.weight',
  'post': 'model.layers.{i}.self_attn.dense.weight',
  'up': 'model.layers.{i}.mlp.fc1.weight',
  'down': 'model.layers.{i}.mlp.fc2.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_layernorm.weight',
}
# Of each head, its queries, keys and values stand together.
GPT_NEOX = {
  'embedding': 'gpt_neox.embed_in.weight',
  'final_norm': 'gpt_neox.final_layer_norm.weight',
  'head': 'embed_out.weight',
  'attention_norm': 'gpt_neox.layers.{i}.input_layernorm.weight',
  'ffn_norm': 'gpt_neox.layers.{i}.post_attention_layernorm.weight',
  'heads': 'gpt_neox.layers.{i}.attention.query_key_value.weight',
  'post': 'gpt_neox.layers.{i}.attention.dense.weight',
  'up': 'gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight',
  'down': 'gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight',
}
# A router whose bias balances the load, and experts that see every token.
SHARED_EXPERTS = HUGGING_FACE | {
  'router_balance': 'model.layers.{i}.mlp.gate.e_score_correction_bias',
  'shared_gate': 'model.layers.{i}.mlp.shared_experts.gate_proj.weight',
  'shared_up': 'model.layers.{i}.mlp.shared_experts.up_proj.weight',
  'shared_down': 'model.layers.{i}.mlp.shared_experts.down_proj.weight',
}
ERNIE_MOE = SHARED_EXPERTS | {
  'router_balance': 'model.layers.{i}.mlp.moe_statics.e_score_correction_bias',
}
DEEPSEEK = SHARED_EXPERTS | {
  'query_down': 'model.layers.{i}.self_attn.q_a_proj.weight',
  'query_down_norm': 'model.layers.{i}.self_attn.q_a_layernorm.weight',
  'query_up': 'model.layers.{i}.self_attn.q_b_proj.weight',
  'latent': 'model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight',
  'latent_norm': 'model.layers.{i}.self_attn.kv_a_layernorm.weight',
  'key_value': 'model.layers.{i}.self_attn.kv_b_proj.weight',
}
# The experts of a block are one tensor, [E, out, in], in which all gates come first.
MISTRAL4 = DEEPSEEK | {
  'expert_gate_up': 'model.layers.{i}.mlp.experts.gate_up_proj',
  'expert_down': 'model.layers.{i}.mlp.experts.down_proj',
}
# Modules that predict further tokens have the numbers behind those of the blocks. Two of their
# tensors are copies. Where a format has no names for them, an export leaves them out.
_PREDICTIONS = {
  'prediction_embedding_norm': 'model.layers.{i}.enorm.weight',
  'prediction_hidden_norm': 'model.layers.{i}.hnorm.weight',
  'prediction_projection': 'model.layers.{i}.eh_proj.weight',
  'prediction_norm': 'model.layers.{i}.shared_head.norm.weight',
  'prediction_embedding': 'model.layers.{i}.embed_tokens.weight',
  'prediction_head': 'model.layers.{i}.shared_head.head.weight',
}
DEEPSEEK_V3 = DEEPSEEK | _PREDICTIONS
DEEPSEEK_V32 = DEEPSEEK_V3 | {
  'index_query': 'model.layers.{i}.self_attn.indexer.wq_b.weight',
  'index_key': 'model.layers.{i}.self_attn.indexer.wk.weight',
  'index_norm': 'model.layers.{i}.self_attn.indexer.k_norm.weight',
  'index_weights': 'model.layers.{i}.self_attn.indexer.weights_proj.weight',
}
GLM4_MOE = SHARED_EXPERTS | _PREDICTIONS
# The experts of a block are one tensor, [E, in, out], in which gate and up take turns.
GPT_OSS = HUGGING_FACE | {
  'sinks': 'model.layers.{i}.self_attn.sinks',
  'router': 'model.layers.{i}.mlp.router.weight',
  'router_bias': 'model.layers.{i}.mlp.router.bias',
  'experts_gate_up': 'model.layers.{i}.mlp.experts.gate_up_proj',
  'experts_gate_up_bias': 'model.layers.{i}.mlp.experts.gate_up_proj_bias',
  'experts_down': 'model.layers.{i}.mlp.experts.down_proj',
  'experts_down_bias': 'model.layers.{i}.mlp.experts.down_proj_bias',
}

DELTA_NET = {
  'delta_gate': 'model.layers.{i}.linear_attn.in_proj_z.weight',
  'delta_beta': 'model.layers.{i}.linear_attn.in_proj_b.weight',
  'delta_decay_input': 'model.layers.{i}.linear_attn.in_proj_a.weight',
  'delta_convolution': 'model.layers.{i}.linear_attn.conv1d.weight',
  'delta_rate': 'model.layers.{i}.linear_attn.A_log',
  'delta_bias': 'model.layers.{i}.linear_attn.dt_bias',
  'delta_norm': 'model.layers.{i}.linear_attn.norm.weight',
  'delta_post': 'model.layers.{i}.linear_attn.out_proj.weight',
}
# Queries and gates of a head of attention follow each other in one tensor.
_GATED = {'query_gate': 'model.layers.{i}.self_attn.q_proj.weight'}
_SHARED = {
  'shared_gate': 'model.layers.{i}.mlp.shared_expert.gate_proj.weight',
  'shared_up': 'model.layers.{i}.mlp.shared_expert.up_proj.weight',
  'shared_down': 'model.layers.{i}.mlp.shared_expert.down_proj.weight',
  'shared_factor': 'model.layers.{i}.mlp.shared_expert_gate.weight',
}
OLMO_HYBRID = OLMO2 | {
  'attention_norm': 'model.layers.{i}.attention_layer_norm.weight',
  'ffn_norm': 'model.layers.{i}.feedforward_layer_norm.weight',
  'delta_query': 'model.layers.{i}.linear_attn.q_proj.weight',
  'delta_key': 'model.layers.{i}.linear_attn.k_proj.weight',
  'delta_value': 'model.layers.{i}.linear_attn.v_proj.weight',
  'delta_gate': 'model.layers.{i}.linear_attn.g_proj.weight',
  'delta_beta': 'model.layers.{i}.linear_attn.b_proj.weight',
  'delta_decay_input': 'model.layers.{i}.linear_attn.a_proj.weight',
  'delta_query_convolution': 'model.layers.{i}.linear_attn.q_conv1d.weight',
  'delta_key_convolution': 'model.layers.{i}.linear_attn.k_conv1d.weight',
  'delta_value_convolution': 'model.layers.{i}.linear_attn.v_conv1d.weight',
  'delta_rate': 'model.layers.{i}.linear_attn.A_log',
  'delta_bias': 'model.layers.{i}.linear_attn.dt_bias',
  'delta_norm': 'model.layers.{i}.linear_attn.o_norm.weight',
  'delta_post': 'model.layers.{i}.linear_attn.o_proj.weight',
}
# The blocks of modules that predict further tokens have other names than those of the model.
_MTP = {
  'prediction_layer': 'mtp.layers.{i}.',
  'prediction_embedding_norm': 'mtp.pre_fc_norm_embedding.weight',
  'prediction_hidden_norm': 'mtp.pre_fc_norm_hidden.weight',
  'prediction_projection': 'mtp.fc.weight',
  'prediction_norm': 'mtp.norm.weight',
}
QWEN3_5 = HUGGING_FACE | DELTA_NET | _GATED | _SHARED | _MTP | {
  'delta_joined': 'model.layers.{i}.linear_attn.in_proj_qkv.weight',
}  # fmt: skip
QWEN3_NEXT = HUGGING_FACE | DELTA_NET | _GATED | _SHARED | _MTP | {
  'delta_packed': 'model.layers.{i}.linear_attn.in_proj_qkvz.weight',
  'delta_packed_gates': 'model.layers.{i}.linear_attn.in_proj_ba.weight',
}  # fmt: skip
LFM2 = HUGGING_FACE | {
  'final_norm': 'model.embedding_norm.weight',
  'attention_norm': 'model.layers.{i}.operator_norm.weight',
  'ffn_norm': 'model.layers.{i}.ffn_norm.weight',
  'post': 'model.layers.{i}.self_attn.out_proj.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_layernorm.weight',
  'gate': 'model.layers.{i}.feed_forward.w1.weight',
  'up': 'model.layers.{i}.feed_forward.w3.weight',
  'down': 'model.layers.{i}.feed_forward.w2.weight',
  'convolution_in': 'model.layers.{i}.conv.in_proj.weight',
  'convolution': 'model.layers.{i}.conv.conv.weight',
  'convolution_post': 'model.layers.{i}.conv.out_proj.weight',
}
_MAMBA2 = {
  'mamba_in': 'model.layers.{i}.mamba.in_proj.weight',
  'mamba_convolution': 'model.layers.{i}.mamba.conv1d.weight',
  'mamba_rate': 'model.layers.{i}.mamba.A_log',
  'mamba_bias': 'model.layers.{i}.mamba.dt_bias',
  'mamba_skip': 'model.layers.{i}.mamba.D',
  'mamba_norm': 'model.layers.{i}.mamba.norm.weight',
  'mamba_post': 'model.layers.{i}.mamba.out_proj.weight',
}
# The shared experts of blocks with experts are the feed-forward layer of blocks without.
_SHARED_MLP = {
  'gate_up': 'model.layers.{i}.shared_mlp.input_linear.weight',
  'down': 'model.layers.{i}.shared_mlp.output_linear.weight',
}
_OWN_EXPERTS = ('gate', 'up', 'down', 'expert_gate', 'expert_up')
GRANITE_HYBRID = {k: v for k, v in HUGGING_FACE.items() if k not in _OWN_EXPERTS} | _MAMBA2 | {
  **_SHARED_MLP,
  **{f'shared_{role}': name for role, name in _SHARED_MLP.items()},
  'router': 'model.layers.{i}.block_sparse_moe.router.layer.weight',
  'expert_gate_up': 'model.layers.{i}.block_sparse_moe.input_linear.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.output_linear.weight',
}  # fmt: skip
_MIXER = {
  role: name.replace('.mamba.', '.mixer.').replace('model.', 'backbone.')
  for role, name in _MAMBA2.items()
}
NEMOTRON_H = _MIXER | {
  'embedding': 'backbone.embeddings.weight',
  'final_norm': 'backbone.norm_f.weight',
  'head': 'lm_head.weight',
  'attention_norm': 'backbone.layers.{i}.norm.weight',
  'ffn_norm': 'backbone.layers.{i}.norm.weight',
  'query': 'backbone.layers.{i}.mixer.q_proj.weight',
  'key': 'backbone.layers.{i}.mixer.k_proj.weight',
  'value': 'backbone.layers.{i}.mixer.v_proj.weight',
  'post': 'backbone.layers.{i}.mixer.o_proj.weight',
  'up': 'backbone.layers.{i}.mixer.up_proj.weight',
  'down': 'backbone.layers.{i}.mixer.down_proj.weight',
  'shared_up': 'backbone.layers.{i}.mixer.shared_experts.up_proj.weight',
  'shared_down': 'backbone.layers.{i}.mixer.shared_experts.down_proj.weight',
  'router': 'backbone.layers.{i}.mixer.gate.weight',
  'router_balance': 'backbone.layers.{i}.mixer.gate.e_score_correction_bias',
  'expert_up': 'backbone.layers.{i}.mixer.experts.{x}.up_proj.weight',
  'expert_down': 'backbone.layers.{i}.mixer.experts.{x}.down_proj.weight',
}
# Each block has attention and Mamba 2.
FALCON_H1 = HUGGING_FACE | _MAMBA2 | {
  'final_norm': 'model.final_layernorm.weight',
  'ffn_norm': 'model.layers.{i}.pre_ff_layernorm.weight',
  'gate': 'model.layers.{i}.feed_forward.gate_proj.weight',
  'up': 'model.layers.{i}.feed_forward.up_proj.weight',
  'down': 'model.layers.{i}.feed_forward.down_proj.weight',
}  # fmt: skip
KIMI_LINEAR = DEEPSEEK | {
  'kda_query': 'model.layers.{i}.self_attn.q_proj.weight',
  'kda_key': 'model.layers.{i}.self_attn.k_proj.weight',
  'kda_value': 'model.layers.{i}.self_attn.v_proj.weight',
  'kda_query_convolution': 'model.layers.{i}.self_attn.q_conv1d.weight',
  'kda_key_convolution': 'model.layers.{i}.self_attn.k_conv1d.weight',
  'kda_value_convolution': 'model.layers.{i}.self_attn.v_conv1d.weight',
  'kda_decay_down': 'model.layers.{i}.self_attn.f_a_proj.weight',
  'kda_decay_up': 'model.layers.{i}.self_attn.f_b_proj.weight',
  'kda_gate_down': 'model.layers.{i}.self_attn.g_a_proj.weight',
  'kda_gate_up': 'model.layers.{i}.self_attn.g_b_proj.weight',
  'kda_rate': 'model.layers.{i}.self_attn.A_log',
  'kda_bias': 'model.layers.{i}.self_attn.dt_bias',
  'kda_beta': 'model.layers.{i}.self_attn.b_proj.weight',
  'kda_norm': 'model.layers.{i}.self_attn.o_norm.weight',
  'kda_post': 'model.layers.{i}.self_attn.o_proj.weight',
  'router': 'model.layers.{i}.block_sparse_moe.gate.weight',
  'router_balance': 'model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias',
  'expert_gate': 'model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight',
  'expert_up': 'model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight',
  'shared_gate': 'model.layers.{i}.block_sparse_moe.shared_experts.gate_proj.weight',
  'shared_up': 'model.layers.{i}.block_sparse_moe.shared_experts.up_proj.weight',
  'shared_down': 'model.layers.{i}.block_sparse_moe.shared_experts.down_proj.weight',
}
META = {
  'embedding': 'tok_embeddings.weight',
  'final_norm': 'norm.weight',
  'head': 'output.weight',
  'attention_norm': 'layers.{i}.attention_norm.weight',
  'ffn_norm': 'layers.{i}.ffn_norm.weight',
  'query': 'layers.{i}.attention.wq.weight',
  'key': 'layers.{i}.attention.wk.weight',
  'value': 'layers.{i}.attention.wv.weight',
  'post': 'layers.{i}.attention.wo.weight',
  'gate': 'layers.{i}.feed_forward.w1.weight',
  'up': 'layers.{i}.feed_forward.w3.weight',
  'down': 'layers.{i}.feed_forward.w2.weight',
}
