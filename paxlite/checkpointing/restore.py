"""Restores parameters from another checkpoint, and reports which variables were restored.

Variables have the names of the model ('transformer/x_layers_0/qkv/w'). A repeated stack can be
restored from unrolled layers, and unrolled layers from a repeated stack. The parameters that LoRA
adds may be missing in the checkpoint.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.tree_util import KeyPath

from paxlite.checkpointing.source import Source, find_source
from paxlite.checkpointing.structure import conversion_hint
from paxlite.checkpointing.variables import Variable, layer_of, stacked
from paxlite.core import shell
from paxlite.core.errors import UserError, compiled, listed
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import DORA_VARIABLES, REPEATED, TOKEN_ROWS, path_name
from paxlite.files import schemes
from paxlite.parallel.quantized_weights import Quantization

log = logging.getLogger('paxlite')

_PARAMS = 'params'
OVERWRITTEN = 'overwritten'  # FP8's field of TrainState, which runs on other backends lack


@dataclasses.dataclass(frozen=True)
class Restore:
  """Which checkpoint to restore from, and which of its variables."""

  path: str  # folder of imported weights, a job_log_dir, or one checkpoint
  # Regular expressions that must match a complete name. Variables of the model with these names
  # keep their initial values, and those of the checkpoint are not used.
  ignore: tuple[str, ...] = ()
  # 'pattern=>replacement' pairs. If the regular expression matches the complete name of a variable
  # of the model, the variable is read under the replacement's name.
  rename: tuple[str, ...] = ()
  # whether to restore the optimizer state and the step too, to continue a run
  whole_state: bool = False
  # attributes of the experiment that determine the shapes, for messages
  sizes: Mapping[str, object] = dataclasses.field(default_factory=dict)
  # function that raises UserError if the model of a source computes something else; None checks
  # nothing
  check: Callable[[Source], None] | None = None


class RestorePlan:
  """The origin of each restored variable of a state.

  The plan is made before anything is compiled or written, so that errors are found early. Raises
  UserError if variables are missing, left over or of another shape (the message names them), a rule
  matches nothing, or the checkpoint's model computes something else.

  Args:
    restore: Which checkpoint and variables to restore.
    abstract: The state to fill, a tree of jax.ShapeDtypeStruct.
    source: The checkpoint at restore.path, if it was found already.
    quantizations: How weights of the state are made of those of a checkpoint, by name: see
      parallel.quantized_weights. A checkpoint may also hold them as the state does.
  """

  def __init__(
    self,
    restore: Restore,
    abstract: PyTree,
    source: Source | None = None,
    quantizations: Mapping[str, Quantization] | None = None,
  ):
    self._restore = restore
    self._quantizations = quantizations or {}
    self._encoded: dict[str, jax.Array] = {}  # of the last weight, until they are asked for
    self.source = find_source(restore.path) if source is None else source
    self._found: dict[str, Variable] = {}
    self.fresh: list[str] = []
    self.ignored: list[str] = []
    stored = self.source.variables if restore.whole_state else self.source.weights
    if not any(k.split('/')[0] == _PARAMS for k in stored):
      raise UserError(f'{self.source.folder} holds no parameters')
    if restore.whole_state and 'step' not in stored:
      raise UserError(
        f'{self.source.folder} holds weights alone, no optimizer state: '
        'leave CHECKPOINT_RESTORE_STATE out'
      )
    self._match(stored, abstract)
    if restore.check is not None:
      restore.check(self.source)

  def __contains__(self, name: str) -> bool:
    return name in self._found or name.rpartition('/')[0] in self._found

  def load(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Restores variable `name` with the shape, dtype and sharding of `like`.

    Only the shards of this process's devices are read, each one separately. A weight that is
    quantized is read when the first of its arrays is asked for.
    """
    whole = name.rpartition('/')[0]
    if whole in self._found:
      if name not in self._encoded:
        quantization, variable = self._quantizations[whole], self._found[whole]
        layer = lambda i: variable if i is None else layer_of(variable, i)
        arrays = quantization.quantized(lambda i: self._read(layer(i), quantization.part))
        self._encoded = {f'{whole}/{key}': array for key, array in arrays.items()}
      return self._encoded.pop(name)
    return self._read(self._found[name], like)

  def _read(self, variable: Variable, like: jax.ShapeDtypeStruct) -> jax.Array:

    @functools.cache
    def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
      return variable.read(tuple(slice(*b) for b in bounds)).astype(like.dtype)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      bounds = [i.indices(n)[:2] for i, n in zip(index, like.shape, strict=True)]
      return part(tuple(bounds))

    return jax.make_array_from_callback(like.shape, like.sharding, read)

  def table(self) -> str:
    """Returns a short table of the restored, ignored and newly initialized variables."""
    lines = [f'Restored from {schemes.shown(self.source.folder)}:']
    for what, names in (
      ('restored', list(self._found)),
      ('ignored', self.ignored),
      ('new', self.fresh),
    ):
      shown = ', '.join(_grouped(names)[:4])
      more = f' … ({len(_grouped(names)) - 4} more)' if len(_grouped(names)) > 4 else ''
      lines.append(f'  {what:9}{len(names):6,}  {shown}{more}')
    return '\n'.join(lines)

  def _match(self, stored: Mapping[str, Variable], abstract: PyTree) -> None:
    used: set[str] = set()
    rules = _IgnoreRules(self._restore.ignore)
    renames = _RenameRules(self._restore.rename)
    problems: list[str] = []
    for full, like in self._wanted(stored, abstract).items():
      kind, _, name = full.partition('/')
      if kind != _PARAMS and not self._restore.whole_state:
        continue
      if rules.match(name):
        self.ignored.append(full)
        continue
      wanted = f'{kind}/{renames(name)}' if name else kind
      variable = _find(stored, wanted, like.shape, used)
      if variable is None and (
        kind == OVERWRITTEN or re.fullmatch(f'{DORA_VARIABLES}|.*{TOKEN_ROWS}', full)
      ):
        self.fresh.append(full)
      elif variable is None:
        problems.append(f'{wanted} is missing')
      elif variable.shape != like.shape:
        problems.append(f'{wanted} is {list(variable.shape)} and the model has {list(like.shape)}')
      else:
        self._found[full] = variable
    for full in stored.keys() - used:
      if full.startswith(f'{_PARAMS}/') and not rules.match(full.partition('/')[2]):
        problems.append(f'{full} is not in the model')
    if problems:
      theirs = self._differing(self._restore.sizes)
      hint = f' The checkpoint is of a model with {shell.flags(theirs)}.' if theirs else ''
      raise UserError(
        f'{self.source.folder} does not fit the model: {listed(problems)}.{hint} '
        "Leave variables out with 'CHECKPOINT_IGNORE_RULES=[REGEX]' (names after params/), "
        f'or choose the experiment that it belongs to{conversion_hint(problems)}'
      )
    for attribute, unused in (
      ('CHECKPOINT_IGNORE_RULES', rules.unused()),
      ('CHECKPOINT_RENAME_RULES', renames.unused()),
    ):
      if unused:
        names = [path_name(p).partition('/')[2] for p, _ in _params(abstract)]
        raise UserError(
          f'{attribute}: {unused[0]!r} matches no whole variable name, such as '
          f'{", ".join(names[:3])} …'
        )

  def _wanted(
    self, stored: Mapping[str, Variable], abstract: PyTree
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the variables to look for by name: those quantized only here, as a whole."""
    found = {}
    for path, like in jax.tree_util.tree_leaves_with_path(abstract):
      name = path_name(path)
      whole = name.rpartition('/')[0]
      if whole in self._quantizations and _find(stored, name, like.shape, set()) is None:
        name, like = whole, self._quantizations[whole].like
      found[name] = like
    return found

  def _differing(self, ours: Mapping[str, object]) -> JsonObject:
    """Returns the values of the source's experiment that differ from `ours`; {} if unknown."""
    if not self.source.experiment.is_file():
      return {}
    theirs = self.source.written_by['values']
    return {k: theirs[k] for k, v in sorted(ours.items()) if k in theirs and theirs[k] != v}


def _params(abstract: PyTree) -> list[tuple[KeyPath, jax.ShapeDtypeStruct]]:
  leaves = jax.tree_util.tree_leaves_with_path(abstract)
  return [(p, x) for p, x in leaves if path_name(p).startswith(f'{_PARAMS}/')]


class _IgnoreRules:
  def __init__(self, patterns: Sequence[str]):
    self._patterns = [compiled(p, 'CHECKPOINT_IGNORE_RULES') for p in patterns]
    self._used: set[str] = set()

  def match(self, name: str) -> bool:
    matching = {p.pattern for p in self._patterns if p.fullmatch(name)}
    self._used |= matching
    return bool(matching)

  def unused(self) -> list[str]:
    return [p.pattern for p in self._patterns if p.pattern not in self._used]


class _RenameRules:
  def __init__(self, rules: Sequence[str]):
    self._rules = []
    for rule in rules:
      pattern, arrow, replacement = rule.partition('=>')
      if not arrow:
        raise UserError(f'CHECKPOINT_RENAME_RULES: {rule!r} must be pattern=>replacement')
      self._rules.append(
        (compiled(pattern.strip(), 'CHECKPOINT_RENAME_RULES'), replacement.strip(), rule)
      )
    self._used: set[str] = set()

  def __call__(self, name: str) -> str:
    for pattern, replacement, rule in self._rules:
      match = pattern.fullmatch(name)
      if match:
        self._used.add(rule)
        try:
          return match.expand(replacement)
        except (re.error, IndexError) as e:
          raise UserError(f'CHECKPOINT_RENAME_RULES: {rule!r}: {e}') from None
    return name

  def unused(self) -> list[str]:
    return [rule for *_, rule in self._rules if rule not in self._used]


def _find(
  stored: Mapping[str, Variable], name: str, shape: Sequence[int], used: set[str]
) -> Variable | None:
  """Returns the variable `name`, if necessary from a stack of the other kind; updates `used`."""
  if name in stored:
    used.add(name)
    return stored[name]
  before, repeated, after = name.partition(f'/{REPEATED}/')
  if repeated:
    layers = [f'{before}/x_layers_{i}/{after}' for i in range(shape[0])]
    if not all(layer in stored for layer in layers):
      return None
    used.update(layers)
    return stacked([stored[layer] for layer in layers])
  # the first number is that of the layer; blocks within a layer have numbers too
  layer = re.fullmatch(r'(.*?)/x_layers_(\d+)/(.*)', name)
  if layer is None or (stack := f'{layer[1]}/{REPEATED}/{layer[3]}') not in stored:
    return None
  i, repeats = int(layer[2]), stored[stack].shape[0]
  if i == repeats - 1:  # If the model has fewer layers, the stack is reported as left over.
    used.add(stack)
  return layer_of(stored[stack], i) if i < repeats else None


def _grouped(names: Sequence[str]) -> list[str]:
  """Returns the names with layer numbers replaced by *, each name once."""
  return list(dict.fromkeys(re.sub(r'x_layers_\d+', 'x_layers_*', n) for n in names))
