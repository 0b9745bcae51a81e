"""The published families with latent attention beside those of DeepSeek; see family_tables."""

from paxlite.experiments.deepseek_sparse import DeepSeekV3_2
from paxlite.experiments.deepseek_v4 import DeepSeekV4
from paxlite.experiments.glm_latent import GLM5, GLM4MoeLite
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Same, activation
from paxlite.weights.deepseek_v4_keys import V4_KEYS
from paxlite.weights.deepseek_v4_layout import DEEPSEEK_V4, deepseek_v4_entries
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERTS_PER_TOKEN,
  GROUPS,
  LENGTHS,
  NO_BIAS,
  NO_MLP_BIAS,
  NORMALIZED,
  UNTIED,
  only,
)
from paxlite.weights.latent_keys import INTERLEAVED, LATENT_EXPERTS, dense_blocks, indexer
from paxlite.weights.prediction_keys import PREDICTION_MODULES

_SPARSE = (
  *LATENT_EXPERTS, *GROUPS, NORMALIZED, NO_MLP_BIAS, dense_blocks(missing=3), PREDICTION_MODULES,
  only('rope_interleave', True),
)  # fmt: skip

LATENT_FAMILIES: dict[str, Family] = {
  'glm4_moe_lite': Family(
    'Glm4MoeLiteForCausalLM', GLM4MoeLite,
    (
      *LATENT_EXPERTS, *GROUPS, NORMALIZED, INTERLEAVED, dense_blocks(missing=1),
      PREDICTION_MODULES,
    ),
    tensor_names.DEEPSEEK_V3, rotary='interleaved',
  ),
  'deepseek_v32': Family(
    'DeepseekV32ForCausalLM', DeepSeekV3_2, (*_SPARSE, *indexer(interleaved=False)),
    tensor_names.DEEPSEEK_V32, rotary='interleaved',
  ),
  'glm_moe_dsa': Family(
    'GlmMoeDsaForCausalLM', GLM5, (*_SPARSE, *indexer(interleaved=True, shares=True)),
    tensor_names.DEEPSEEK_V32, rotary='interleaved',
  ),
  'deepseek_v4': Family(
    'DeepseekV4ForCausalLM', DeepSeekV4,
    (
      *(key for key in LENGTHS if 'intermediate_size' not in key.theirs), *V4_KEYS,
      EXPERTS_PER_TOKEN, UNTIED, NO_BIAS, NO_MLP_BIAS,
      Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
    ),
    DEEPSEEK_V4, rotary='interleaved', entries=deepseek_v4_entries,
  ),
}  # fmt: skip
