"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK, YARN

CASES = {
  'phi3': BLOCK | dict(sliding_window=9),
  'phi3 longrope': BLOCK
  | dict(
    original_max_position_embeddings=64, tie_word_embeddings=True,
    rope_parameters=dict(
      rope_type='longrope', rope_theta=1e4, partial_rotary_factor=0.75,
      short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0],
    ),
  ),
  'phi': BLOCK
  | dict(
    layer_norm_eps=1e-3, qk_layernorm=True,
    rope_parameters=YARN | dict(partial_rotary_factor=0.5),
  ),
}  # fmt: skip
