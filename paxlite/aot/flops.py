"""FLOPs of the matrix multiplications of a compiled program, whatever their form."""

import collections
import functools
import math
import re

import numpy as np

from paxlite.aot.hlo import ArrayShape, Computation, Instruction, Program
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Kernel, KernelCall
from paxlite.layers.moe.grouped_matmul import is_call


def flops_of(
  program: Program, computation: Computation, instruction: Instruction, tpu: bool
) -> dict[str, float]:
  """Returns FLOPs of one run of an instruction by the type of its operands, such as bf16.

  On a TPU, float32 at the highest precision is computed as six products of bfloat16.
  """
  if instruction.opcode == 'fusion':
    found: collections.Counter[str] = collections.Counter()
    for inner in program.called(instruction):
      for i in inner:
        found.update(flops_of(program, inner, i, tpu))
    return dict(found)
  operands = [a for name in instruction.operands for a in computation.arrays(name)]
  if instruction.opcode == 'dot':
    contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.attributes)
    dims = [int(d) for d in contracted[1].split(',') if d] if contracted else []
    n = 2.0 * instruction.arrays[0].size * math.prod(operands[0].dims[d] for d in dims)
  elif instruction.opcode == 'convolution':
    n = convolution_flops(instruction, operands[0], operands[1])
  elif instruction.opcode == 'ragged-dot':
    n = 2.0 * instruction.arrays[0].size * operands[0].dims[-1]
  elif instruction.opcode == 'custom-call':
    n = _custom_call_flops(instruction, computation, operands)
  else:
    return {}
  if not n:
    return {}
  passes = 6 if tpu and 'highest' in instruction.attributes else 1
  is_product = instruction.opcode != 'custom-call' or _is_cublas(instruction)
  factors = operands[:2] if is_product else operands  # cuBLAS adds to a third one
  dtype = max(factors, key=lambda array: array.size).dtype
  return {dtype: n * passes}


def convolution_flops(convolution: Instruction, left: ArrayShape, right: ArrayShape) -> float:
  """Returns FLOPs of a convolution, with products of padding and of holes left out.

  A TPU's matrix multiplications are convolutions: a batch dimension is a spatial one whose window
  meets one element at a time, so the size of the window alone says nothing.
  """
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', convolution.attributes)
  if labels is None:
    return 0.0
  of = lambda dims, names: dict(zip(names, dims, strict=True))
  inputs, kernel = of(left.dims, labels[1]), of(right.dims, labels[2])
  output = of(convolution.arrays[0].dims, labels[3])
  window = re.search(r'window=\{(.*?)\}', convolution.attributes)
  fields = dict(part.split('=') for part in window[1].split()) if window else {}
  split = lambda key: fields[key].split('x') if key in fields else []
  groups = int(convolution.attribute('feature_group_count') or 1)
  batches = int(convolution.attribute('batch_group_count') or 1)
  total: float = 2.0 * inputs['b'] / batches * inputs['f'] / groups * output['f']
  for i, axis in enumerate(sorted(c for c in labels[1] if c.isdigit())):
    at = lambda key, default, i=i: int(split(key)[i]) if split(key) else default
    low = int(split('pad')[i].split('_')[0]) if split('pad') else 0
    total *= _meetings(
      inputs[axis], kernel[axis], output[axis], at('stride', 1), low,
      at('lhs_dilate', 1), at('rhs_dilate', 1),
    )  # fmt: skip
  return total


@functools.cache
def _meetings(
  size: int, kernel: int, output: int, stride: int, low: int, dilation: int, window_dilation: int
) -> int:
  """Counts pairs of an output and an element of the window that meet an element of the input."""
  count = 0
  for k in range(kernel):
    at = np.arange(output) * stride + k * window_dilation - low
    is_inside = (at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)
    count += int(np.count_nonzero(is_inside))
  return count


def attention_call(
  instruction: Instruction, computation: Computation
) -> tuple[Kernel, KernelCall] | None:
  """Returns the kernel of attention that an instruction calls, and the call; None for others."""
  if instruction.opcode != 'custom-call':
    return None
  name = f'{instruction.quoted("custom_call_target")} {instruction.name}'
  kernel = attention_kernels.of_call(name)
  if kernel is None:
    return None
  operands = [a for of in instruction.operands for a in computation.arrays(of)]
  floats = [a.dims for a in operands if 'f' in a.dtype and len(a.dims) >= 3]
  return kernel, KernelCall(name, instruction.attributes, floats)


def _custom_call_flops(
  call: Instruction, computation: Computation, operands: list[ArrayShape]
) -> float:
  if _is_cublas(call):
    contracted = re.search(r'"lhs_contracting_dimensions":\["?(\d+)', call.attributes)
    inner = operands[0].dims[int(contracted[1])] if contracted else 0
    return 2.0 * call.arrays[0].size * inner
  flops = 0.0
  if found := attention_call(call, computation):
    flops = found[0].flops(found[1])
  elif rows := grouped_rows(call):
    of_groups = [a for a in (*operands, *call.arrays) if len(a.dims) == 3]
    flops = 2.0 * rows[0] * math.prod(of_groups[0].dims[1:])
  stated = None if flops else _STATED_COST.search(call.attributes)
  return float(stated[1]) if stated else flops


def _is_cublas(call: Instruction) -> bool:
  return call.quoted('custom_call_target').startswith('__cublas')


_GROUPED_ROWS = re.compile(r'\brows_(\d+)_of_(\d+)\b')


def grouped_rows(call: Instruction) -> tuple[int, int] | None:
  """Returns the rows that a grouped product multiplies at equal load, and those it has room for.

  paxlite.layers.moe.dropless writes them into the name; None for other calls.
  """
  return grouped_rows_in(call.source) if is_call(call.quoted('custom_call_target')) else None


def grouped_rows_in(name: str) -> tuple[int, int] | None:
  """Returns the two numbers of `grouped_rows` from the name of an operation."""
  found = _GROUPED_ROWS.search(name)
  return (int(found[1]), int(found[2])) if found else None


_STATED_COST = re.compile(r'\\?"cost_estimate\\?":\s*\{[^}]*\\?"flops\\?":\s*\\?"?(\d+)')
