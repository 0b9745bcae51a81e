"""The extension for adapters: the factors of USE_LORA, and the attributes that choose them."""

from paxlite.core.extension import Extension

_HERE = 'paxlite.adapters'
EXTENSION = Extension(
  'adapters',
  needs=('quantization',),
  hooks={
    'USE_LORA': f'{_HERE}.factors:LowRankFactors',
    'a model without factors': f'{_HERE}.factors:removed',
  },
  callbacks=(f'{_HERE}.untrained_rows:callbacks',),
  options={
    f'{_HERE}.attributes:AdapterChoices': (
      'LORA_ALPHA', 'LORA_RS', 'LORA_DROPOUT', 'LORA_TARGETS', 'LORA_RANK_PATTERN',
      'LORA_ALPHA_PATTERN', 'LORA_LAYERS', 'LORA_MODULES_TO_SAVE', 'LORA_TOKENS',
    )
  },
  former_modules={'paxlite.layers.dora': f'{_HERE}.dora', 'paxlite.layers.lora': f'{_HERE}.lora'},
)  # fmt: skip
