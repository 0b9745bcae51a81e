"""Converts parameters and Adam's moments to Transformer Engine's layers and back, bit for bit.

    self_attention/qkv/combined/w [3, D, N, H] ↔ attention/qkv/kernel [D, 3, N·H]

One table of rules serves both directions. Dimensions are counted from the last one, so that the
rules for one block also convert the parameters [L, …] of a repeated stack. Adam's moments are
converted in the same way.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.source import Source
from paxlite.checkpointing.variables import Variable, write_variable
from paxlite.core.errors import UserError, listed
from paxlite.data.tokenizer_copies import copy_tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation.inference import experiment_of
from paxlite.parallel.mesh import MESH_AXES
from paxlite.transformer_engine.templates import check_supported
from paxlite.weights.folder import write_identity
from paxlite.weights.unfinished_folder import unfinished_folder

Arrays = Mapping[str, np.ndarray]
Transform = Callable[[np.ndarray], np.ndarray]


class TeLayout(NamedTuple):
  """The conversion of a paxlite array to Transformer Engine's layout, and the reverse."""

  to_theirs: Transform
  to_ours: Transform

  def then(self, other: 'TeLayout') -> 'TeLayout':
    return TeLayout(
      lambda x: other.to_theirs(self.to_theirs(x)), lambda y: self.to_ours(other.to_ours(y))
    )


SAME = TeLayout(lambda x: x, lambda y: y)
TRANSPOSED = TeLayout(lambda x: x.swapaxes(-1, -2), lambda y: y.swapaxes(-1, -2))
PARTS_INSIDE = TeLayout(lambda x: x.swapaxes(-2, -3), lambda y: y.swapaxes(-2, -3))  # [3, D, X]


def heads_joined(heads: int, head_dim: int) -> TeLayout:
  """Returns the layout […, N, H] ↔ […, N·H]."""
  return TeLayout(
    lambda x: x.reshape(*x.shape[:-2], heads * head_dim),
    lambda y: y.reshape(*y.shape[:-1], heads, head_dim),
  )


@dataclasses.dataclass(frozen=True)
class Rule:
  """The conversion of one parameter of Transformer Engine."""

  theirs: str  # name of Transformer Engine's parameter
  ours: tuple[str, ...]  # names of the paxlite parameters that it consists of
  layout: TeLayout = SAME  # layout of each of these parameters
  stacked: bool = False  # whether Transformer Engine's parameter stacks them, […, len(ours), X]

  def to_theirs(self, params: Arrays) -> np.ndarray:
    parts = [self.layout.to_theirs(params[name]) for name in self.ours]
    return np.stack(parts, axis=-2) if self.stacked else parts[0]

  def to_ours(self, params: Arrays) -> dict[str, np.ndarray]:
    whole = params[self.theirs]
    parts = np.moveaxis(whole, -2, 0) if self.stacked else [whole]
    return {n: self.layout.to_ours(x) for n, x in zip(self.ours, parts, strict=True)}


def block_rules(e: LanguageModel) -> list[Rule]:
  """Returns the rules for one block of an experiment."""
  return [*_attention_rules(e), *_ffn_rules(e)]


def to_te(params: Arrays, rules: Sequence[Rule]) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the names and values of a block's parameters in Transformer Engine's layout.

  Raises UserError if the parameters are not those of the rules.
  """
  _check_names(params, [name for rule in rules for name in rule.ours])
  return ((rule.theirs, rule.to_theirs(params)) for rule in rules)


def from_te(params: Arrays, rules: Sequence[Rule]) -> Iterator[tuple[str, np.ndarray]]:
  """Reverses to_te; raises UserError if the parameters are not those of the rules."""
  _check_names(params, [rule.theirs for rule in rules])
  return (pair for rule in rules for pair in rule.to_ours(params).items())


def convert(
  source: Source, to: pathlib.Path, to_te_layer: bool, report: Callable[[int, int], None]
) -> tuple[int, LanguageModel]:
  """Writes a checkpoint for the other kind of block, variable by variable.

  Args:
    source: A checkpoint or imported weights.
    to: The folder to write, which must not exist.
    to_te_layer: Whether to convert to USE_TE=layer, or else from it.
    report: Called with the number of variables written and the number of variables in the source.

  Returns:
    Bytes of the variables, and the experiment of the new checkpoint.

  Raises:
    UserError: The source already has the wanted kind of block, or Transformer Engine has no such
      block. No folder is left behind.
  """
  before = experiment_of(source)
  if (before.USE_TE == 'layer') == to_te_layer:
    raise UserError(f'{source.folder} has USE_TE={before.USE_TE}: choose the other --direction')
  changes: dict[str, object] = dict(USE_TE='off', TE_RECIPE='bf16')
  if to_te_layer:
    changes |= dict(USE_TE='layer', USE_FP8=False, USE_INT8='off', PACKED_INPUT=False)
  after = before.replaced(**changes)
  if before.USE_LORA:
    raise UserError(f'{source.folder} has USE_LORA=True: low-rank factors are not supported there')
  one_device = dict(MESH_AXES=list(MESH_AXES), ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1])
  check_supported(after.replaced(**one_device))
  if to.absolute().is_relative_to(source.folder.absolute()):
    raise UserError(f'{to} is inside the folder to convert: choose another folder')
  variables = {k: v for k, v in source.variables.items() if not k.startswith('overwritten/')}
  size = done = 0
  with unfinished_folder(to) as folder:
    for name, value in _converted(variables, block_rules(before), to_te_layer):
      write_variable(folder / 'state', name.replace('/', '.'), value)
      size += value.nbytes
      done += 1
      report(done, len(variables))
    copy_tokenizer(source.tokenizer, folder)
    write_identity(folder, after)
    write_checksums(folder)
  return size, after


# params/transformer/x_layers_3/…, opt_state/1/m/transformer/repeat/…
_BLOCK = re.compile(r'(?P<block>.*/transformer/(?:x_layers_\d+|repeat))/(?P<name>.*)')


def _converted(
  variables: Mapping[str, Variable], rules: Sequence[Rule], to_te_layer: bool
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields every variable with its new name; only the variables of blocks are converted."""
  blocks: dict[str, dict[str, Variable]] = {}
  for full, variable in variables.items():
    match = _BLOCK.fullmatch(full)
    if match is None:
      yield full, variable.whole()
      continue
    name = match['name'] if to_te_layer else match['name'].removeprefix(_INNER)
    blocks.setdefault(match['block'], {})[name] = variable
  for block, named in blocks.items():
    pairs = (to_te if to_te_layer else from_te)(_Read(named), rules)
    for name, value in pairs:
      yield f'{block}/{_INNER if to_te_layer else ""}{name}', value


_INNER = 'te/'  # TeTransformerLayer's name of Transformer Engine's layer


class _Read(Mapping[str, np.ndarray]):
  """Variables as NumPy arrays; each is read when it is used."""

  def __init__(self, variables: Mapping[str, Variable]):
    self._variables = variables

  def __getitem__(self, name: str) -> np.ndarray:
    return self._variables[name].whole()

  def __iter__(self) -> Iterator[str]:
    return iter(self._variables)

  def __len__(self) -> int:
    return len(self._variables)


def _attention_rules(e: LanguageModel) -> list[Rule]:
  query_heads = heads_joined(e.NUM_HEADS, e.DIMS_PER_HEAD)
  key_heads = heads_joined(e.NUM_KV_HEADS, e.DIMS_PER_HEAD)
  qkv, out = 'self_attention/qkv', 'self_attention/post'
  if e.NUM_KV_HEADS == e.NUM_HEADS:
    first = 'attention/qkv'
    weights = [Rule(f'{first}/kernel', (f'{qkv}/combined/w',), query_heads.then(PARTS_INSIDE))]
    biases = [Rule(f'{first}/bias', (f'{qkv}/combined/b',), query_heads)]
  else:
    first = 'attention/query'
    keys_values = lambda kind: (f'{qkv}/key/{kind}', f'{qkv}/value/{kind}')
    weights = [
      Rule(f'{first}/kernel', (f'{qkv}/query/w',), query_heads),
      Rule('attention/kv/kernel', keys_values('w'), key_heads, stacked=True),
    ]
    biases = [
      Rule(f'{first}/bias', (f'{qkv}/query/b',), query_heads),
      Rule('attention/kv/bias', keys_values('b'), key_heads, stacked=True),
    ]
  weights.append(Rule('attention/out/kernel', (f'{out}/w',), query_heads.then(TRANSPOSED)))
  biases.append(Rule('attention/out/bias', (f'{out}/b',)))
  return [*_norm_rules(e, first, 'layer_norm'), *weights, *(biases if e.USE_BIAS else [])]


def _ffn_rules(e: LanguageModel) -> list[Rule]:
  up, down = 'ff_layer/ffn_layer1', 'ff_layer/ffn_layer2'
  inputs = (f'{up}_gate', up) if e.USE_GATED_ACTIVATION else (up,)

  def products(theirs: str, kind: str) -> list[Rule]:
    return [
      Rule(f'mlp/wi_{theirs}', tuple(f'{name}/{kind}' for name in inputs), stacked=True),
      Rule(f'mlp/wo_{theirs}', (f'{down}/{kind}',)),
    ]

  biases = products('bias', 'b') if e.USE_FFN_BIAS else []
  return [*_norm_rules(e, 'mlp', 'ff_layer_norm'), *products('kernel', 'w'), *biases]


def _norm_rules(e: LanguageModel, theirs: str, ours: str) -> list[Rule]:
  scale = Rule(f'{theirs}/scale', (f'{ours}/scale',))
  bias = Rule(f'{theirs}/ln_bias', (f'{ours}/bias',))
  return [scale, bias] if e.NORM_CLS == 'LayerNorm' else [scale]


def _check_names(params: Arrays, expected: Sequence[str]) -> None:
  wrong = [f'{name} is missing' for name in expected if name not in params]
  wrong += [f'{name} is unknown' for name in params if name not in expected]
  if wrong:
    raise UserError(f"these are not the parameters of this experiment's blocks: {listed(wrong)}")
