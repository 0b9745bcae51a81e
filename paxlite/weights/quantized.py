"""Tensors that are published in FP8, MXFP4 or int4, dequantized to bfloat16 when they are read."""

from collections.abc import Mapping
from typing import Protocol

import ml_dtypes
import numpy as np

from paxlite.core.errors import UserError
from paxlite.weights.config_keys import Config
from paxlite.weights.packed_int4 import (
  METHOD,
  PACKED,
  SCALE,
  SHAPE,
  group_size,
  unpacked,
  unpacked_shape,
)

_PLAIN = ('F32', 'BF16', 'F16')
_TABLE = '.tid2eid'  # the end of the names of tables of the experts of token ids
_INTEGERS = ('I64', 'I32')
# The 16 values of FP4 (E2M1), by its bits. MXFP4 multiplies blocks of 32 of them by a power of two
# (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])


class ReadableTensors(Protocol):
  """The tensors of a folder, with the names of their dtypes in safetensors files."""

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

  @property
  def dtypes(self) -> Mapping[str, str]: ...

  def read(self, name: str) -> np.ndarray: ...


class Dequantized:
  """The tensors of a folder; some are stored in FP8, MXFP4 or int4.

  Raises UserError if a tensor has another dtype, or the scales of a tensor are missing.

  Attributes:
    stored: The tensors as they are stored.
  """

  def __init__(self, stored: ReadableTensors, config: Config):
    self.stored = stored
    self._group = group_size(config) if config.get('quant_method') == METHOD else 0
    self._block = tuple(config.get('weight_block_size') or (128, 128))
    self.shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.shapes.items():
      dtype = stored.dtypes[name]
      if name.endswith('_blocks') and name.replace('_blocks', '_scales') in stored.shapes:
        scales = stored.shapes[name.replace('_blocks', '_scales')]
        if len(shape) != 4 or tuple(scales) != tuple(shape[:3]):
          raise UserError(f'{name} is {list(shape)} and its scales are {list(scales)}')
        experts, outputs, blocks, pairs = shape
        self.shapes[name.removesuffix('_blocks')] = (experts, blocks * pairs * 2, outputs)
      elif self._group and name.endswith(PACKED) and dtype == 'I32':
        weight = name.removesuffix(PACKED)
        scales = stored.shapes.get(weight + SCALE, ())
        self.shapes[weight] = unpacked_shape(weight, shape, scales, self._group)
      elif name.endswith(('_scales', '_scale_inv')) or self._is_part(name):
        continue  # read with its tensor
      elif dtype == 'F8_E4M3' and f'{name}_scale_inv' in stored.shapes:
        self._check_scales(name, shape, f'{name}_scale_inv')
        self.shapes[name] = shape
      elif dtype in _PLAIN or (name.endswith(_TABLE) and dtype in _INTEGERS):
        self.shapes[name] = shape
      else:
        raise UserError(
          f'{name} is {dtype} without scales that paxlite knows; weights must be float32, bfloat16 '
          'or float16: dequantize them first'
        )

  def read(self, name: str) -> np.ndarray:
    if name + PACKED in self.stored.shapes and self._group:
      scales = self.stored.read(name + SCALE)
      return unpacked(self.stored.read(name + PACKED), scales, self._group)
    if name not in self.stored.shapes:
      return self._mxfp4(name)
    if self.stored.dtypes[name] == 'F8_E4M3':
      return self._fp8(name)
    return self.stored.read(name)

  def _is_part(self, name: str) -> bool:
    """Returns whether a tensor is the scales, or the shape, of weights that are packed in int4."""
    stems = (name.removesuffix(end) for end in (SCALE, SHAPE) if name.endswith(end))
    return self._group > 0 and any(stem + PACKED in self.stored.shapes for stem in stems)

  def _check_scales(self, name: str, shape: tuple[int, ...], of_scales: str) -> None:
    scales, dtype = self.stored.shapes[of_scales], self.stored.dtypes[of_scales]
    if dtype not in _PLAIN:
      raise UserError(f'{of_scales} is {dtype}: scales must be float32, bfloat16 or float16')
    wanted = [-(-n // size) for n, size in zip(shape, self._block, strict=False)]
    if len(shape) != 2 or list(scales) != wanted:
      raise UserError(
        f'{of_scales} is {list(scales)}, and the blocks of {name} {list(shape)} are '
        f'{list(self._block)} (weight_block_size)'
      )

  def _fp8(self, name: str) -> np.ndarray:
    """Returns FP8 values times the scales of their blocks, as DeepSeek stores them."""
    values = self.stored.read(name).astype(np.float32)
    scales = self.stored.read(f'{name}_scale_inv').astype(np.float32)
    rows, columns = self._block
    repeated = scales.repeat(rows, 0)[: values.shape[0]].repeat(columns, 1)[:, : values.shape[1]]
    return (values * repeated).astype(ml_dtypes.bfloat16)

  def _mxfp4(self, name: str) -> np.ndarray:
    """Returns the weights [E, in, out] of experts; gpt-oss stores blocks [E, out, in / 32, 16]."""
    blocks, scales = self.stored.read(f'{name}_blocks'), self.stored.read(f'{name}_scales')
    experts, outputs = blocks.shape[:2]
    values = np.empty((experts, outputs, blocks[0, 0].size * 2), ml_dtypes.bfloat16)
    for expert in range(experts):  # one at a time, as float32 takes eight times the memory
      pairs = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1)
      exponents = scales[expert].astype(np.int32)[..., None, None] - 127
      values[expert] = np.ldexp(_FP4[pairs], exponents).reshape(outputs, -1)
    return values.swapaxes(1, 2)
