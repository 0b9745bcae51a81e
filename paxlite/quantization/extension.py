"""The extension for quantization: USE_FP8, USE_INT8, and 8- and 4-bit weights and moments."""

from paxlite.core.extension import Extension

_HERE = 'paxlite.quantization'
EXTENSION = Extension(
  'quantization',
  hooks={
    'USE_FP8': f'{_HERE}.products:in_fp8',
    'USE_INT8': f'{_HERE}.products:in_int8',
    'FROZEN_DTYPE': f'{_HERE}.frozen_weights:scheme_named',
    'FROZEN_DTYPE of a task': f'{_HERE}.frozen_weights:quantize',
    'ADAM_MOMENTS_DTYPE': f'{_HERE}.eight_bits:kept_in_eight_bits',
  },
  former_modules={
    'paxlite.layers.precision.four_bits': f'{_HERE}.four_bits',
    'paxlite.layers.precision.fp8_matmul': f'{_HERE}.fp8_matmul',
    'paxlite.layers.precision.quantization': f'{_HERE}.schemes',
    'paxlite.layers.precision.quantized_projection': f'{_HERE}.quantized_projection',
    'paxlite.layers.precision.weight_forms': f'{_HERE}.schemes',
    'paxlite.optim.eight_bits': f'{_HERE}.eight_bits',
  },
)
