"""How the published models of Mixtral are stored; see weights.family."""

from paxlite.experiments.mixtral import Mixtral
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Same
from paxlite.weights.family import Family
from paxlite.weights.family_keys import EXPERT_SILU, EXPERTS_PER_TOKEN, GIVEN_KV, UNTIED, WINDOW
from paxlite.weights.rope_keys import rope

FAMILIES: dict[str, Family] = {
  'mixtral': Family(
    'MixtralForCausalLM', Mixtral,
    (
      *GIVEN_KV, EXPERT_SILU, UNTIED, rope(theta=1e6), WINDOW, EXPERTS_PER_TOKEN,
      Same('num_local_experts', 'NUM_EXPERTS'),
    ),
    tensor_names.MIXTRAL,
  ),
}  # fmt: skip
