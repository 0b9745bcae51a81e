"""How the published models of Seed-OSS are stored; see weights.family."""

from paxlite.experiments.seed_oss import SeedOss
from paxlite.weights.config_keys import Same
from paxlite.weights.family import Family
from paxlite.weights.family_keys import COMMON, GIVEN_HEADS

FAMILIES: dict[str, Family] = {
  'seed_oss': Family(
    'SeedOssForCausalLM', SeedOss,
    (
      *GIVEN_HEADS, *COMMON, Same('attention_bias', 'USE_QKV_BIAS', default=True),
      Same('attention_out_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
    ),
  ),
}  # fmt: skip
