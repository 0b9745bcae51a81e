"""Parameters from another checkpoint: which of its variables go where, and the table that says so.

Names are those of the model's variables ('transformer/x_layers_0/qkv/w'). A repeated stack takes
its layers from an unrolled one and the other way round. What LoRA adds may be absent.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paxlite.checkpointing.checkpoints import conversion
from paxlite.checkpointing.source import Source, find_source, read_values
from paxlite.checkpointing.variables import Variable, layer_of, stacked
from paxlite.core import shell
from paxlite.core.errors import UserError, compiled, listed
from paxlite.core.variable_names import path_name
from paxlite.layers.lora import LORA_VARIABLES
from paxlite.layers.transformer import REPEATED

log = logging.getLogger('paxlite')

_PARAMS = 'params'
OVERWRITTEN = 'overwritten'  # TrainState's field: a run on another backend has none of it


@dataclasses.dataclass(frozen=True)
class Restore:
  """Which variables to take from another checkpoint.

  Attributes:
    path: A folder of weights, a job_log_dir or one checkpoint.
    ignore: Regular expressions of whole names. The model's variables of these names keep their
      initial values, and the checkpoint's are left out.
    rename: 'pattern=>replacement' pairs; the model's variable whose whole name the regular
      expression matches is read from the name that it is replaced by.
    whole_state: Whether optimizer state and step are restored too, to continue a run.
    sizes: Attributes of the experiment that decide the shapes, for messages.
    check: Raises UserError where a source's model computes something else; None checks nothing.
  """

  path: str
  ignore: tuple[str, ...] = ()
  rename: tuple[str, ...] = ()
  whole_state: bool = False
  sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  check: Callable[[Source], None] | None = None


class Plan:
  """The source of each variable of a state, found before anything is compiled or written.

  Args:
    restore: What is asked for.
    abstract: The state to fill: jax.ShapeDtypeStructs.
    source: The checkpoint at restore.path, where it was found already.

  Raises:
    UserError: variables are missing, left over or of another shape (they are named), a rule
      matches nothing, or the checkpoint is of a model that computes something else.
  """

  def __init__(self, restore: Restore, abstract: Any, source: Source | None = None):
    self._restore = restore
    self.source = find_source(restore.path) if source is None else source
    self._found: dict[str, Variable] = {}
    self.fresh: list[str] = []
    self.ignored: list[str] = []
    stored = dict(self.source.variables)
    if not restore.whole_state:
      stored = {k: v for k, v in stored.items() if k.split('/')[0] == _PARAMS}
    if not any(k.split('/')[0] == _PARAMS for k in stored):
      raise UserError(f'{self.source.folder} holds no parameters')
    if restore.whole_state and 'step' not in stored:
      raise UserError(
        f'{self.source.folder} holds weights alone, no optimizer state: '
        'leave --fdl.CHECKPOINT_RESTORE_STATE out'
      )
    self._match(stored, abstract)
    if restore.check is not None:
      restore.check(self.source)

  def __contains__(self, name: str) -> bool:
    return name in self._found

  def load(self, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Variable `name` as `like` is shaped, typed and sharded; each device's part is read alone."""
    variable = self._found[name]

    @functools.cache
    def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
      return variable.read(tuple(slice(*b) for b in bounds)).astype(like.dtype)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      bounds = [i.indices(n)[:2] for i, n in zip(index, like.shape, strict=True)]
      return part(tuple(bounds))

    return jax.make_array_from_callback(like.shape, like.sharding, read)

  def table(self) -> str:
    """The variables that are restored, ignored and initialised, in a few lines."""
    lines = [f'Restored from {self.source.folder}:']
    for what, names in (
      ('restored', list(self._found)),
      ('ignored', self.ignored),
      ('new', self.fresh),
    ):
      shown = ', '.join(_grouped(names)[:4])
      more = f' … ({len(_grouped(names)) - 4} more)' if len(_grouped(names)) > 4 else ''
      lines.append(f'  {what:9}{len(names):6,}  {shown}{more}')
    return '\n'.join(lines)

  def _match(self, stored: Mapping[str, Variable], abstract: Any) -> None:
    used: set[str] = set()
    rules = _IgnoreRules(self._restore.ignore)
    renames = _RenameRules(self._restore.rename)
    problems: list[str] = []
    for path, like in jax.tree_util.tree_leaves_with_path(abstract):
      full = path_name(path)
      kind, _, name = full.partition('/')
      if kind != _PARAMS and not self._restore.whole_state:
        continue
      if rules.match(name):
        self.ignored.append(full)
        continue
      wanted = f'{kind}/{renames(name)}' if name else kind
      variable = _find(stored, wanted, like.shape, used)
      if variable is None and (kind == OVERWRITTEN or re.fullmatch(LORA_VARIABLES, full)):
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
        "Leave variables out with '--fdl.CHECKPOINT_IGNORE_RULES=[REGEX]' (names after params/), "
        f'or choose the experiment that it belongs to{conversion(problems)}'
      )
    for attribute, unused in (
      ('CHECKPOINT_IGNORE_RULES', rules.unused()),
      ('CHECKPOINT_RENAME_RULES', renames.unused()),
    ):
      if unused:
        names = [path_name(p).partition('/')[2] for p, _ in _params(abstract)]
        raise UserError(
          f'{attribute}: {unused[0]!r} matches no whole name; there are {", ".join(names[:3])} …'
        )

  def _differing(self, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the source's experiment that differ from ours, as far as they are known."""
    if not self.source.experiment.is_file():
      return {}
    theirs = read_values(self.source)['values']
    return {k: theirs[k] for k, v in ours.items() if k in theirs and theirs[k] != v}


def _params(abstract: Any) -> list[Any]:
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
  """The variable `name`, from a stack of the other kind if need be; notes what is used."""
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
  layer = re.fullmatch(r'(.*)/x_layers_(\d+)/(.*)', name)
  if layer is None or (stack := f'{layer[1]}/{REPEATED}/{layer[3]}') not in stored:
    return None
  i, repeats = int(layer[2]), stored[stack].shape[0]
  if i == repeats - 1:  # a model of fewer layers leaves some over, which is printed
    used.add(stack)
  return layer_of(stored[stack], i) if i < repeats else None


def _grouped(names: Sequence[str]) -> list[str]:
  """Names with layer numbers as *, each once."""
  return list(dict.fromkeys(re.sub(r'x_layers_\d+', 'x_layers_*', n) for n in names))
