"""The part of a model that an instruction of a compiled program comes from.

JAX notes for each operation the path of the modules that made it. The compiler keeps the path and,
where it merges operations, all of their paths: `jit(step)/jvp(…)/x_layers_0/(qkv/dot:post/dot)`.
"""

import dataclasses
import re
from collections.abc import Iterator

from paxlite.aot.explanation_tables import ELSEWHERE
from paxlite.aot.hlo import Computation, Instruction, Program, closing, split

FORWARD, RECOMPUTED, BACKWARD, UPDATE = 'forward', 'recomputed', 'backward', 'update'
LAYER = 'layer'  # the name of every layer of the stack
_LAYER = re.compile(r'(repeat|x_layers_\d+|[A-Z]\w*)$')  # in a pipeline, it is the layer's class
_OTHER_LAYER = re.compile(r'(first|last)_\d+$')
_MODULE = re.compile(r'[A-Za-z_]\w*$')
_NO_MODULE = re.compile(
  r'(jit|jvp|vmap|transpose|checkpoint|remat|pjit|shard_map|eval_jaxpr|while|body|cond|einsum|'
  r'closed_call|rematted_computation|named_computation|custom_vjp_call|core_call|branch_\d+_fun)\b'
)
_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_FAR = 3  # steps of the search for a path


@dataclasses.dataclass(frozen=True, order=True)
class Origin:
  """A part of a model, and which pass over it."""

  block: str  # 'embedding', 'layer/self_attention', 'logits', 'loss', 'update', …
  of: str  # forward, recomputed, backward or update


def origins(path: str) -> tuple[Origin, ...]:
  """Returns the origins that a path of the compiler names, without repetition, in order.

  >>> origins('jit(step)/jvp(Lm.losses)/Lm.hidden/transformer/x_layers_3/ff_layer/ffn_layer1/dot')
  (Origin(block='layer/ff_layer', of='forward'),)
  """
  return tuple(dict.fromkeys(_origin(one) for one in _alternatives(path)))


class Paths:
  """The paths of the instructions of a program.

  Copies, and collectives that the partitioner adds, may have no path. They get that of the nearest
  instruction that uses the result, or, if it is a reduction, makes the operand.
  """

  def __init__(self, program: Program):
    self._callers = {
      called.name: (computation, instruction)
      for computation in program.computations.values()
      for instruction in computation
      if instruction.opcode in ('fusion', 'call', 'async-start')
      for called in program.called(instruction)
    }

  def origins(self, computation: Computation, instruction: Instruction) -> tuple[Origin, ...]:
    """Returns the origins of an instruction; one called 'elsewhere' where no path is near."""
    path = self.path(computation, instruction)
    return origins(path) if path else (Origin(ELSEWHERE, ELSEWHERE),)

  def path(self, computation: Computation, instruction: Instruction, far: int = _FAR) -> str:
    """Returns the path of an instruction; '' where none is so near."""
    if instruction.source or not far:
      return instruction.source
    using = [(computation, user) for user in computation.users.get(instruction.name, ())]
    using += [self._callers[computation.name]] if computation.name in self._callers else []
    used = [(computation, computation.get(name)) for name in instruction.operands]
    is_reduction = instruction.opcode.removesuffix('-start') in _REDUCTIONS
    near = used + using if is_reduction else using + used
    paths = (self.path(*one, far - 1) for one in near if one[1].opcode not in ('while', 'tuple'))
    return next(filter(None, paths), '')


def _alternatives(path: str) -> Iterator[str]:
  """Yields the paths that a merged path stands for."""
  opening = re.search(r'(?:^|/)\(', path)
  if opening is None:
    yield path
    return
  start = opening.end() - 1
  end = closing(path, start)
  for part in split(path[start + 1 : end], ':'):
    yield from _alternatives(path[:start] + part + path[end + 1 :])


def _origin(path: str) -> Origin:
  parts = path.split('/')
  if not any('jvp(' in part for part in parts):
    return Origin(UPDATE, UPDATE)
  of = FORWARD
  if any(part.startswith('transpose(') for part in parts):
    of = RECOMPUTED if 'rematted_computation' in parts else BACKWARD
  last = max(i for i, part in enumerate(parts) if 'jvp(' in part)
  methods = [part.rpartition('.')[2] for part in parts[last + 1 :] if '.' in part]
  modules = [p for p in parts[last + 1 : -1] if _MODULE.match(p) and not _NO_MODULE.match(p)]
  if '_uncapped_logits' in methods or 'attend' in methods:
    return Origin('logits', of)
  if 'transformer' in modules:
    modules = modules[modules.index('transformer') + 1 :]
    name = LAYER
    if modules and _OTHER_LAYER.match(modules[0]):
      name = modules.pop(0)
    elif modules and _LAYER.match(modules[0]):
      modules.pop(0)
    if modules and _LAYER.match(modules[0]):  # a block of several in a layer
      name = f'{name}/{modules.pop(0).removeprefix("x_layers_")}'
    return Origin('/'.join([name, *modules[:1]]), of)
  if modules:
    return Origin(modules[0], of)
  return Origin('embedding' if 'hidden' in methods else 'loss', of)
