"""How llama.cpp stores Phi 3; see weights.gguf_architecture."""

from paxlite.weights.gguf_architecture import SILU, SIZES, Architecture

ARCHITECTURES = (
  Architecture(
    'phi3', 'phi3', SIZES,
    {
      **SILU, 'lm_head_bias': (False,), 'full_attn_mod': (1,), 'interpolate_factor': (1,),
      'partial_rotary_factor': (1.0,),
    },
    spans_model=True,
  ),
)  # fmt: skip
