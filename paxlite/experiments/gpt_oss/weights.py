"""How the published models of gpt-oss are stored; see weights.family."""

from paxlite.experiments.gpt_oss import GptOss
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import OneOf, Same, layer_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import EXPERTS_PER_TOKEN, GIVEN_HEADS, UNTIED
from paxlite.weights.rope_keys import rope

# The experts of a block are one tensor, [E, in, out], in which gate and up take turns.
GPT_OSS = tensor_names.HUGGING_FACE | {
  'sinks': 'model.layers.{i}.self_attn.sinks',
  'router': 'model.layers.{i}.mlp.router.weight',
  'router_bias': 'model.layers.{i}.mlp.router.bias',
  'experts_gate_up': 'model.layers.{i}.mlp.experts.gate_up_proj',
  'experts_gate_up_bias': 'model.layers.{i}.mlp.experts.gate_up_proj_bias',
  'experts_down': 'model.layers.{i}.mlp.experts.down_proj',
  'experts_down_bias': 'model.layers.{i}.mlp.experts.down_proj_bias',
}

FAMILIES: dict[str, Family] = {
  'gpt_oss': Family(
    'GptOssForCausalLM', GptOss,
    (
      *GIVEN_HEADS, UNTIED, rope(theta=150_000.0, is_stretched=True),
      layer_types(['sliding', 'full']),
      EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'), OneOf('attention_bias', True),
      OneOf('hidden_act', 'silu'), OneOf('swiglu_limit', 7.0), OneOf('swiglu_alpha', 1.702),
    ),
    GPT_OSS,
  ),
}  # fmt: skip
