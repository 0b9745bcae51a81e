"""Tiny models of the family; see experiments.cases."""

from typing import Any

from paxlite.experiments.cases import BLOCK, YARN, Draw

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
ON_MESHES: dict[str, dict[str, Any]] = {'phi3 longrope': {}}
# Values that were once read otherwise than transformers does, by the messages that refuse them.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
  r'more max_position_embeddings \(64\)': ('phi3 longrope', dict(max_position_embeddings=64)),
  'original_max_position_embeddings is 32, and 64': (
    'phi3 longrope', dict(original_max_position_embeddings=32),
  ),
}  # fmt: skip


def drawn(kind: str, seed: int) -> dict[str, Any]:
  """Returns a config.json of a model_type of the family with random options."""
  draw = Draw(kind, seed, spans=True)
  config, pick = draw.block(), draw.pick
  if kind == 'phi':
    config['rope_parameters'] = draw.partial_rope()
    config['layer_norm_eps'] = config.pop('rms_norm_eps')
    config['qk_layernorm'] = draw.chance()
    return config
  config['sliding_window'] = pick(None, draw.window)
  config |= dict(original_max_position_embeddings=pick(16, 40))
  share = pick(1.0, 0.5) if draw.width in (4, 16) else 1.0
  pairs = int(draw.width * share) // 2
  factors = dict(
    short_factor=list(draw.rng.uniform(1, 3, pairs)),
    long_factor=list(draw.rng.uniform(1, 9, pairs)),
  )
  plain = dict(rope_type='default', rope_theta=draw.theta)
  long = dict(rope_type='longrope', rope_theta=draw.theta, **factors)
  config['rope_parameters'] = pick(plain, long) | dict(partial_rotary_factor=share)
  return config
