"""How llama.cpp stores GLM-4 and GLM-4.5; see weights.gguf_architecture."""

from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import SIZES, Architecture


class Glm4MoeArchitecture(Architecture):
  """The fields of the router."""

  def own_fields(self, config: Config) -> dict[str, object]:
    return {
      'expert_gating_func': 2,  # sigmoids
      'expert_weights_scale': float(config['routed_scaling_factor']),
    }


ARCHITECTURES = (
  Architecture(
    'glm4', 'glm4', SIZES,
    {'hidden_act': ('silu',), 'attention_bias': (True, False), 'partial_rotary_factor': (0.5,)},
    'interleaved', stretchings=(),
  ),
  Glm4MoeArchitecture(
    'glm4_moe', 'glm4moe',
    SIZES | {
      'expert_count': 'n_routed_experts', 'expert_used_count': 'num_experts_per_tok',
      'expert_feed_forward_length': 'moe_intermediate_size',
      'expert_shared_count': 'n_shared_experts', 'expert_weights_norm': 'norm_topk_prob',
      'leading_dense_block_count': 'first_k_dense_replace',
      'expert_weights_scale': 'routed_scaling_factor',
    },
    {
      'hidden_act': ('silu',), 'attention_bias': (True, False), 'use_qk_norm': (True, False),
      'partial_rotary_factor': (0.5,), 'n_group': (1,), 'topk_group': (1,),
    },
    stretchings=(), own_names={'router_balance': 'exp_probs_b.bias'},
  ),
)  # fmt: skip
