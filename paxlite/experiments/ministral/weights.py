"""How the published models of Ministral 3 are stored; see weights.family."""

from paxlite.experiments.ministral import Ministral3
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GIVEN_HEADS, SILU, UNTIED, WINDOW
from paxlite.weights.rope_keys import rope

FAMILIES: dict[str, Family] = {
  'ministral3': Family(
    'Ministral3ForCausalLM', Ministral3,
    (*GIVEN_HEADS, SILU, UNTIED, WINDOW, rope(is_stretched=True, has_growth=True)),
  ),
}  # fmt: skip
