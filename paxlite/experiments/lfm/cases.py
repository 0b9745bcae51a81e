"""Tiny models of the family; see experiments.cases."""

from paxlite.experiments.cases import BLOCK

CASES = {
  'lfm2': BLOCK
  | dict(
    conv_bias=True, conv_L_cache=3, block_multiple_of=12, block_ffn_dim_multiplier=1.5,
    layer_types=['conv', 'full_attention', 'conv', 'conv'],
  ),
  'lfm2 untied': BLOCK
  | dict(
    conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False, full_attn_idxs=[1, 3]
  ),
}  # fmt: skip
