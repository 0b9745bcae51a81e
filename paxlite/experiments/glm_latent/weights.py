"""How the published models of GLM-4.7-Flash and GLM-5 are stored; see weights.family."""

from paxlite.experiments.deepseek.weights import DEEPSEEK_V3, latent_attention_entries
from paxlite.experiments.deepseek_sparse.weights import (
  DEEPSEEK_V32,
  INTERLEAVED,
  LATENT_EXPERTS,
  SPARSE,
  dense_blocks,
  indexer,
  sparse_entries,
)
from paxlite.experiments.glm_latent import GLM5, GLM4MoeLite
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GROUPS, NORMALIZED
from paxlite.weights.prediction_keys import PREDICTION_MODULES

FAMILIES: dict[str, Family] = {
  'glm4_moe_lite': Family(
    'Glm4MoeLiteForCausalLM', GLM4MoeLite,
    (
      *LATENT_EXPERTS, *GROUPS, NORMALIZED, INTERLEAVED, dense_blocks(missing=1),
      PREDICTION_MODULES,
    ),
    DEEPSEEK_V3, rotary='interleaved', attention=latent_attention_entries,
    classifier=None,
  ),
  'glm_moe_dsa': Family(
    'GlmMoeDsaForCausalLM', GLM5, (*SPARSE, *indexer(interleaved=True, shares=True)),
    DEEPSEEK_V32, rotary='interleaved', entries=sparse_entries,
    classifier=None,
  ),
}  # fmt: skip
