"""The types of the tensors of a GGUF file that paxlite writes."""

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np

from paxlite.weights import q4_k

# By the value of --type: the name of gguf's GGMLQuantizationType, and of its LlamaFileType.
TYPES = {
  'f32': ('F32', 'ALL_F32'), 'f16': ('F16', 'MOSTLY_F16'), 'bf16': ('BF16', 'MOSTLY_BF16'),
  'q8_0': ('Q8_0', 'MOSTLY_Q8_0'), 'q4_k': ('Q4_K', 'MOSTLY_Q4_K_S'),
}  # fmt: skip
OF_DTYPES = {'float32': 'f32', 'float16': 'f16', 'bfloat16': 'bf16'}
_BLOCKS = {'q8_0': 32, 'q4_k': q4_k.BLOCK}
_SMALLER = {'q4_k': 'q8_0', 'q8_0': 'f16'}  # where the length of a row is no multiple of a block
# llama.cpp keeps these in float32, because it adds or compares what they give
_EXACT = (
  'ffn_gate_inp.weight', 'ffn_gate_inp_shexp.weight', 'rope_freqs.weight', 'shortconv.conv.weight',
  'ssm_conv1d.weight', '_norm.weight',
)  # fmt: skip


def chosen(name: str, shape: tuple[int, ...], wanted: str) -> str:
  """Returns the type that a tensor has in a file of type `wanted`.

  Vectors, norms, routers, short convolutions and what is no weight are float32. Where the length
  of a row is no multiple of 256, q4_k becomes q8_0, and where it is none of 32, that becomes f16.
  """
  if len(shape) == 1 or name.endswith(_EXACT) or not name.endswith('.weight'):
    return 'f32'
  while shape[-1] % _BLOCKS.get(wanted, 1):
    wanted = _SMALLER[wanted]
  return wanted


def quantization(kind: str) -> Any:
  """Returns gguf's GGMLQuantizationType of a type."""
  from gguf.constants import GGMLQuantizationType

  return GGMLQuantizationType[TYPES[kind][0]]


def byte_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
  """Returns the shape of the bytes of a tensor."""
  from gguf.constants import GGML_QUANT_SIZES

  block, size = GGML_QUANT_SIZES[quantization(kind)]
  return (*shape[:-1], shape[-1] // block * size)


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
  """Returns the bytes of a tensor, uint8 [..., n]."""
  from gguf import quants

  values = np.ascontiguousarray(values, np.float32)
  stored = q4_k.encode(values) if kind == 'q4_k' else quants.quantize(values, quantization(kind))
  return stored.view(np.uint8)


def counted(kinds: Iterable[str]) -> str:
  """Returns how many tensors have each type, as a message shows it."""
  count = collections.Counter(kinds)
  return ', '.join(f'{count[kind]:,} {kind}' for kind in TYPES if kind in count)
