"""Which frozen weights have low-rank factors, and of which rank."""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import fiddle as fdl
from fiddle import selectors

from paxlite import extensions
from paxlite.adapters.dora import DoraProjection
from paxlite.adapters.lora import Chosen, LoraProjection, chosen_at
from paxlite.adapters.lora_experts import LoraMoeFeedForward
from paxlite.adapters.token_rows import RowsEmbedding, RowsHead
from paxlite.core import shell
from paxlite.core.errors import UserError, compiled, listed
from paxlite.core.near_names import did_you_mean
from paxlite.core.variable_names import REPEATED
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.embeddings import LmHead, TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.moe.moe import MoeFeedForward
from paxlite.layers.projection import Projection

_LAYER = r'x_layers_\d+'
_CHOICES = (
  'LORA_RANK', 'LORA_ALPHA', 'LORA_RS', 'LORA_TARGETS', 'LORA_RANK_PATTERN', 'LORA_ALPHA_PATTERN',
  'LORA_LAYERS',
)  # fmt: skip
_ROWS: dict[type, type] = {TokenEmbedding: RowsEmbedding, LmHead: RowsHead}


class FactorSize(NamedTuple):
  """The rank of a weight's factors, and what their product is multiplied by."""

  rank: int
  scale: float


class LowRankFactors:
  """The factors of an experiment with USE_LORA.

  Args:
    e: The experiment. One without AdapterChoices has what they begin with.
  """

  def __init__(self, e: LanguageModel):
    self._e = e
    self._alpha = options.value(e, 'LORA_ALPHA')
    self._over_root = options.value(e, 'LORA_RS')
    self._targets = options.value(e, 'LORA_TARGETS')
    self._layers = options.value(e, 'LORA_LAYERS')
    self._ranks = options.value(e, 'LORA_RANK_PATTERN')
    self._alphas = options.value(e, 'LORA_ALPHA_PATTERN')

  @property
  def whole_variables(self) -> list[str]:
    """Regular expressions of the variables that LORA_MODULES_TO_SAVE names."""
    texts = options.value(self._e, 'LORA_MODULES_TO_SAVE')
    if not texts:
      return []
    names = self.named_weights()
    found = self._found(texts, names, 'LORA_MODULES_TO_SAVE')
    # peft takes any end of a name here: 'norm' names input_layernorm too
    is_end = lambda n: n.kind == 'whole' and any(map(n.theirs.endswith, texts))
    found = [name for name in names if name in found or is_end(name)]
    if factors := [name.theirs for name in found if name.kind != 'whole']:
      raise UserError(
        f'LORA_MODULES_TO_SAVE: {factors[0]} is a matrix of a layer: name it in LORA_TARGETS, or '
        'train it whole with TRAINABLE_VARIABLES'
      )
    stack = lambda name: re.sub(_LAYER, REPEATED, name.ours, count=1)
    partly = {*map(stack, {*names} - {*found})}
    if self._e.USE_REPEATED_LAYER and (wrong := [n.theirs for n in found if stack(n) in partly]):
      raise UserError(
        f'LORA_MODULES_TO_SAVE names {wrong[0]} alone, but a repeated stack has one array for all '
        'layers: USE_REPEATED_LAYER=False'
      )
    general = f'({REPEATED}|x_layers_[0-9]+)'
    patterns = (
      re.escape(n.ours)
      if stack(n) in partly
      else re.sub(_LAYER, general, re.escape(n.ours), count=1)
      for n in found
    )
    return list(dict.fromkeys(patterns))

  def add_to(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers of the stack."""
    chosen = self.chosen
    for projection in self._projections(lm):
      fdl.update_callable(projection, DoraProjection if self._e.USE_DORA else LoraProjection)
      projection.rank = self._usual.rank
      projection.factor_scale = self._usual.scale
      projection.dropout = options.value(self._e, 'LORA_DROPOUT')
      projection.chosen = chosen
    if ids := options.value(self._e, 'LORA_TOKENS'):
      _train_rows(lm, ids)
    if chosen is None or not any(name.endswith('_factors') for name, *_ in chosen):
      return
    for experts in selectors.select(lm.transformer_tpl, MoeFeedForward, check_nonempty=False):
      kind = fdl.get_callable(experts)
      if kind is not MoeFeedForward:
        raise UserError(
          f"LORA_TARGETS names experts, but LoRA does not support this model's {kind.__name__}: "
          'name other weights'
        )
      fdl.update_callable(experts, LoraMoeFeedForward)
      experts.chosen = chosen

  def _projections(self, lm: fdl.Config) -> Iterable[fdl.Buildable]:
    attention, mlp = self._e.attention_classes, (FeedForward,)
    layers = {'all': (*attention, *mlp), 'attention': attention, 'mlp': mlp}
    if self._targets:
      without = {
        id(p)
        for layer in attention
        for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False)
        for p in self._e.without_factors(target)
      }
      for projection in selectors.select(lm.transformer_tpl, Projection):
        if id(projection) not in without and fdl.get_callable(projection) is Projection:
          yield projection
      return
    for layer in layers[self._e.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False):
        without = {*map(id, self._e.without_factors(target))}
        for projection in selectors.select(target, Projection):
          if id(projection) not in without:
            yield projection

  def named_weights(self) -> list[Any]:
    """Returns the weights of the model with peft's names; UserError if peft has no names."""
    # not self.replaced, which asks for all values, and so for TRAINABLE_VARIABLES
    stated = {name: value for name, value in vars(self._e).items() if name.isupper()}
    plain = type(self._e)(**stated | dict(USE_LORA=False, LORA_MODULES_TO_SAVE=[]))
    found: list[Any] = extensions.hook('names of peft')(plain)
    return found

  @property
  def _usual(self) -> FactorSize:
    return self._factors(self._e.LORA_RANK, self._alpha)

  def _factors(self, rank: int, alpha: float | None) -> FactorSize:
    return FactorSize(rank, (alpha or rank) / (math.sqrt(rank) if self._over_root else rank))

  def by_name(self) -> dict[str, FactorSize]:
    """Returns the factors of each weight that LORA_TARGETS and the other attributes choose.

    Raises UserError if an attribute names no weight, or a weight that has no factors.
    """
    names = self.named_weights()
    for text in self._targets:
      kinds = {name.kind for name in names if name.is_named(text)}
      if kinds == {'whole'}:
        raise UserError(
          f'LORA_TARGETS: {text!r} is not a matrix of a layer, so it cannot have factors: '
          'LORA_MODULES_TO_SAVE trains it whole'
        )
    chosen = self._found(self._targets or ['all-linear'], names, 'LORA_TARGETS')
    chosen = [name for name in chosen if name.kind != 'whole']
    if self._layers:
      number = lambda name: int(m[1]) if (m := re.match(r'.*?\.(\d+)\.', name.theirs)) else -1
      chosen = [name for name in chosen if number(name) in self._layers]
      if absent := {*self._layers} - {*map(number, chosen)}:
        raise UserError(
          f'LORA_LAYERS={self._layers}: layer {min(absent)} has none of the weights of '
          'LORA_TARGETS: layers are numbered from 0'
        )
    ranks = _pattern(self._ranks, 'LORA_RANK_PATTERN', chosen)
    alphas = _pattern(self._alphas, 'LORA_ALPHA_PATTERN', chosen)
    return {
      name.theirs: self._factors(
        int(ranks.get(name.theirs, self._e.LORA_RANK)), alphas.get(name.theirs, self._alpha)
      )
      for name in chosen
    }

  def _found(self, texts: Sequence[str], names: Sequence[Any], attribute: str) -> list[Any]:
    """Returns the weights that any of `texts` names; UserError if one names none."""
    for text in texts:
      compiled(text, attribute)
      if not any(name.is_named(text) for name in names):
        last = sorted({name.theirs.rpartition('.')[2] for name in names})
        raise UserError(
          f'{attribute}: {text!r} is not a weight of {type(self._e).__name__}, which has '
          f'{listed(last, shown=12)}. {did_you_mean(text, last)}'.rstrip()
        )
    return [name for name in names if any(map(name.is_named, texts))]

  def of(self, names: Iterable[str]) -> dict[str, FactorSize]:
    """Returns the factors of weights that have some, by peft's names."""
    if self.chooses:
      found = self.by_name()
      return {name: found.get(name, FactorSize(0, 1.0)) for name in names}
    return dict.fromkeys(names, self._usual)

  def at(self, module: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the ranks and the scales of the parts of a module of an unrolled stack."""
    if (chosen := self.chosen) is not None:
      return chosen_at(chosen, module.split('/'))
    return (self._usual.rank,), (self._usual.scale,)

  def check_continued(self, writer: LanguageModel, stored: Iterable[str]) -> None:
    """Raises UserError if factors of a checkpoint would lose columns, or be multiplied otherwise.

    Args:
      writer: The experiment that wrote it.
      stored: The names of its parameters, those of an unrolled stack.
    """
    before = LowRankFactors(writer)
    for name in stored:
      module = name.removesuffix('/lora_a')
      forms = name, re.sub(_LAYER, REPEATED, name, count=1)
      rules = self._e.ignored_variables
      if module == name or any(re.fullmatch(rule, form) for rule in rules for form in forms):
        continue
      sizes = before.at(module), self.at(module)
      parts = max(len(ranks) for ranks, _ in sizes)
      theirs, ours = (
        [FactorSize(*size) for size in zip(*(x * (parts // len(x)) for x in of), strict=True)]
        for of in sizes
      )
      for there, here in zip(theirs, ours, strict=True):
        is_kept = here.rank >= there.rank and math.isclose(here.scale, there.scale, rel_tol=1e-6)
        if there.rank and not is_kept:
          raise UserError(
            f'the factors of {module} have rank {there.rank} and scale {there.scale:g}, but this '
            f'run has rank {here.rank} and scale {here.scale:g}, which would lose some of the '
            f'training: {shell.flags(self._differing(writer))}, or merge the factors first with '
            'paxlite export --to=hf'
          )

  def _differing(self, writer: LanguageModel) -> dict[str, object]:
    """Returns the values of `writer` that choose other factors than the experiment has."""
    values = {name: options.value(writer, name) for name in _CHOICES}
    return {k: v for k, v in values.items() if v != options.value(self._e, k)}

  @property
  def chooses(self) -> bool:
    return bool(self._targets or self._layers or self._ranks or self._alphas)

  @functools.cached_property
  def chosen(self) -> tuple[Chosen, ...] | None:
    """Returns the factors of modules, by regular expressions of their paths; None: of all alike."""
    if not self.chooses:
      return None
    factors = self.by_name()
    modules: dict[str, list[FactorSize]] = {}
    for name in self.named_weights():
      if name.kind != 'whole':
        parts = modules.setdefault(name.ours, [])
        if name.part is not None or not parts:
          parts.append(factors.get(name.theirs, FactorSize(0, 1.0)))
    stacks: dict[str, dict[str, tuple[FactorSize, ...]]] = {}
    for ours, parts in modules.items():
      stacks.setdefault(re.sub(_LAYER, REPEATED, ours, count=1), {})[ours] = tuple(parts)
    found: list[Chosen] = []
    for stack, layers in stacks.items():
      kinds = {*layers.values()}
      if len(kinds) == 1:
        path = stack.replace(f'/{REPEATED}/', f'/({REPEATED}|{_LAYER})/', 1)
        found += [(path, *_columns(sizes)) for sizes in kinds]
        continue
      if self._e.USE_REPEATED_LAYER:
        raise UserError(
          'LORA_LAYERS, LORA_TARGETS or patterns give layers different factors, but a repeated '
          f'stack has one array for all layers: USE_REPEATED_LAYER=False (of {stack})'
        )
      if len({_columns(sizes)[0] for sizes in kinds}) < len(kinds):  # a trace is of equal shapes
        raise UserError(
          f'LORA_ALPHA_PATTERN gives layers of one rank different alphas ({stack}): give these '
          'weights one alpha, or different ranks too'
        )
      found += [(ours, *_columns(sizes)) for ours, sizes in layers.items()]
    return tuple(entry for entry in found if any(entry[1]))


def _train_rows(lm: fdl.Config, ids: Sequence[int]) -> None:
  """Adds rows of LORA_TOKENS to the embedding, and to the head if it is another table."""
  for table in filter(None, (lm.embedding_tpl, lm.head_tpl)):
    kind = cast(type, fdl.get_callable(table))
    if kind not in _ROWS:
      raise UserError(f'LORA_TOKENS: a {kind.__name__} has no rows to train')
    fdl.update_callable(table, _ROWS[kind])
    table.row_ids = tuple(ids)


def removed(model: fdl.Config) -> bool:
  """Removes the factors from a model's config; returns whether it had any."""
  factors = list(selectors.select(model, LoraProjection, check_nonempty=False))
  for projection in factors:
    for name in ('rank', 'factor_scale', 'dropout', 'chosen'):
      delattr(projection, name)
    fdl.update_callable(projection, Projection)
  fields: dict[type, tuple[type, str]] = {MoeFeedForward: (LoraMoeFeedForward, 'chosen')}
  fields |= {plain: (kind, 'row_ids') for plain, kind in _ROWS.items()}
  for plain, (kind, field) in fields.items():
    for layer in selectors.select(model, kind, check_nonempty=False):
      delattr(layer, field)
      fdl.update_callable(layer, plain)
  return bool(factors)


def _columns(parts: Sequence[FactorSize]) -> tuple[tuple[int, ...], tuple[float, ...]]:
  return tuple(part.rank for part in parts), tuple(part.scale for part in parts)


def _pattern(texts: Sequence[str], attribute: str, names: Sequence[Any]) -> dict[str, float]:
  """Returns the numbers that 'NAME=NUMBER' state, by peft's names; the first match counts.

  A name is a regular expression of the end of a name, as in peft.
  """
  found: dict[str, float] = {}
  for text in texts:
    pattern, is_there, number = text.rpartition('=')
    try:
      value = float(number)
      is_right = bool(is_there) and 0 < value < math.inf
      is_right &= attribute != 'LORA_RANK_PATTERN' or value == int(value)
    except ValueError:
      is_right = False
    if not is_right:
      raise UserError(f"{attribute}: {text!r} must be NAME=NUMBER, as 'q_proj=16', above 0")
    compiled(pattern, attribute)
    matching = [
      name.theirs
      for name in names
      if re.match(rf'(.*\.)?({pattern})$', name.theirs) or name.is_named(pattern)
    ]
    if not matching:
      raise UserError(f'{attribute}: {pattern!r} matches no weight with factors')
    for name in matching:
      found.setdefault(name, value)
  return found
