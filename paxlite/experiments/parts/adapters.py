"""Attributes of low-rank factors beside frozen weights: which weights have them, of which rank."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

import fiddle as fdl
from fiddle import selectors

from paxlite import extensions
from paxlite.config.attribute_kinds import Below1, Count, Positive, Training
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError, compiled, listed
from paxlite.core.near_names import did_you_mean
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES, REPEATED, TOKEN_ROWS
from paxlite.experiments.base import Experiment
from paxlite.layers.attention.attention import Attention
from paxlite.layers.dora import DoraProjection
from paxlite.layers.embeddings import LmHead, TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.lora import Chosen, LoraProjection, chosen_at
from paxlite.layers.moe.lora_experts import LoraMoeFeedForward
from paxlite.layers.moe.moe import MoeFeedForward
from paxlite.layers.projection import Projection
from paxlite.layers.token_rows import RowsEmbedding, RowsHead

_EVERY = 'all-linear'  # peft's word for all weights of layers that are matrices
_IS_EXPRESSION = re.compile(r'[][*+?()|\\^$]')
_LAYER = r'x_layers_\d+'


class NamedWeight(NamedTuple):
  """A weight of a model with the name that peft has for it.

  Attributes:
    ours: The variable; of a weight that may have factors, the module that has them.
    part: Its index in a variable that combines queries, keys and values, or None.
    theirs: The module of transformers, or the parameter of experts.
    kind: What it may have: factors of a projection or of experts; other weights are trained whole.
  """

  ours: str
  part: int | None
  theirs: str
  kind: Literal['linear', 'experts', 'whole']

  def is_named(self, text: str) -> bool:
    """Whether peft takes `text` for the name of this weight, or it is the end of ours."""
    if text == _EVERY:
      return self.kind == 'linear'
    if _IS_EXPRESSION.search(text):
      return re.fullmatch(text, self.theirs) is not None
    if self.kind == 'experts' and text == 'experts':
      return True
    own = re.sub(r'/(w|scale|emb_var)$', '', self.ours)
    return f'.{self.theirs}'.endswith(f'.{text}') or f'/{own}'.endswith(f'/{text}')


class FactorSize(NamedTuple):
  """The rank of a weight's factors, and what their product is multiplied by."""

  rank: int
  scale: float


class Adapters(
  Experiment,
  subject='Adapters',
  beside={
    'USE_LORA': 'USE_DORA LORA_RANK LORA_TARGET_LAYERS LORA_ALPHA LORA_RS LORA_DROPOUT '
    'LORA_TARGETS LORA_RANK_PATTERN LORA_ALPHA_PATTERN LORA_LAYERS LORA_MODULES_TO_SAVE '
    'LORA_TOKENS'
  },
):
  """LoRA and DoRA train low-rank factors beside the weights, which are frozen."""

  USE_LORA: Training[bool] = False  # trains low-rank factors of weights, and freezes the weights
  USE_DORA: Training[bool] = False  # with USE_LORA, trains the lengths of weights beside factors
  LORA_RANK: Training[Count] = 8  # rank of the factors of LoRA
  LORA_TARGET_LAYERS: Training[Literal['all', 'attention', 'mlp']] = (
    'all'  # layers whose projections have factors of LoRA, unless LORA_TARGETS names weights
  )
  LORA_ALPHA: Training[Positive | None] = (
    None  # the product of LoRA's factors is multiplied by this / rank; None: by 1
  )
  LORA_RS: Training[bool] = False  # divides LORA_ALPHA by the root of the rank instead (rsLoRA)
  LORA_DROPOUT: Training[Below1] = 0.0  # dropout rate of the inputs of LoRA's factors
  LORA_TARGETS: Training[list[str]] = []  # weights with factors, by peft's names or by ours
  LORA_RANK_PATTERN: Training[list[str]] = []  # ranks of some weights, 'NAME=RANK', as peft's
  LORA_ALPHA_PATTERN: Training[list[str]] = []  # LORA_ALPHA of some weights, 'NAME=ALPHA'
  LORA_LAYERS: Training[list[int]] = []  # layers with factors, from 0; []: all
  LORA_MODULES_TO_SAVE: Training[
    list[str]
  ] = []  # weights beside the factors that are trained whole, by peft's names

  LORA_TOKENS: Training[
    list[int]
  ] = []  # ids whose rows of the embedding and of the head are trained beside the factors

  @property
  def saves_trainable_only(self) -> bool:
    return self.USE_LORA and bool(self.CHECKPOINT_RESTORE_PATH)

  @property
  def has_repeated_stack(self) -> bool:
    """Whether equal layers have one array together."""
    return False

  @property
  def factor_variables(self) -> list[str]:
    """Regular expressions of what is trained with USE_LORA."""
    return [DORA_VARIABLES if self.USE_DORA else LORA_VARIABLES, *self._beside_factors]

  @property
  def every_factor_variable(self) -> list[str]:
    """The same with either expression for factors, of which one includes the other."""
    return [LORA_VARIABLES, DORA_VARIABLES, *self._beside_factors]

  @property
  def _beside_factors(self) -> list[str]:
    return [*self.whole_variables, *([TOKEN_ROWS] if self.LORA_TOKENS else [])]

  @property
  def whole_variables(self) -> list[str]:
    """Regular expressions of the variables that LORA_MODULES_TO_SAVE names."""
    if not self.LORA_MODULES_TO_SAVE:
      return []
    names = self.named_weights()
    found = self._found(self.LORA_MODULES_TO_SAVE, names, 'LORA_MODULES_TO_SAVE')
    if factors := [name.theirs for name in found if name.kind != 'whole']:
      raise UserError(
        f'LORA_MODULES_TO_SAVE: {factors[0]} is a matrix of a layer, which has factors instead: '
        'name it in LORA_TARGETS, or train it whole by TRAINABLE_VARIABLES'
      )
    of = lambda name: re.sub(_LAYER, f'({REPEATED}|x_layers_[0-9]+)', re.escape(name.ours), count=1)
    return list(dict.fromkeys(map(of, found)))

  def add_lora(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers of the stack."""
    chosen = self._chosen()
    for projection in self._projections(lm):
      fdl.update_callable(projection, DoraProjection if self.USE_DORA else LoraProjection)
      projection.rank = self.LORA_RANK
      projection.factor_scale = self._factors(self.LORA_RANK, self.LORA_ALPHA).scale
      projection.dropout = self.LORA_DROPOUT
      projection.chosen = chosen
    if self.LORA_TOKENS:
      self._train_rows(lm)
    if chosen is None or not any(name.endswith('_factors') for name, *_ in chosen):
      return
    for experts in selectors.select(lm.transformer_tpl, MoeFeedForward, check_nonempty=False):
      kind = fdl.get_callable(experts)
      if kind is not MoeFeedForward:
        raise UserError(
          f'LORA_TARGETS names experts, and those of this model are a {kind.__name__}, which has '
          'no factors: name other weights'
        )
      fdl.update_callable(experts, LoraMoeFeedForward)
      experts.chosen = chosen

  def _train_rows(self, lm: fdl.Config) -> None:
    """Adds rows of LORA_TOKENS to the embedding, and to the head if it is another table."""
    kinds: dict[type, type] = {TokenEmbedding: RowsEmbedding, LmHead: RowsHead}
    for table in filter(None, (lm.embedding_tpl, lm.head_tpl)):
      kind = cast(type, fdl.get_callable(table))
      if kind not in kinds:
        raise UserError(f'LORA_TOKENS: a {kind.__name__} has no rows of its own to train')
      fdl.update_callable(table, kinds[kind])
      table.row_ids = tuple(self.LORA_TOKENS)

  def _projections(self, lm: fdl.Config) -> Iterable[fdl.Buildable]:
    attention, mlp = self.attention_classes, (FeedForward,)
    layers = {'all': (*attention, *mlp), 'attention': attention, 'mlp': mlp}
    if self.LORA_TARGETS:
      without = {
        id(p)
        for layer in attention
        for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False)
        for p in self.without_factors(target)
      }
      for projection in selectors.select(lm.transformer_tpl, Projection):
        if id(projection) not in without and fdl.get_callable(projection) is Projection:
          yield projection
      return
    for layer in layers[self.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm.transformer_tpl, layer, check_nonempty=False):
        without = {*map(id, self.without_factors(target))}
        for projection in selectors.select(target, Projection):
          if id(projection) not in without:
            yield projection

  @property
  def attention_classes(self) -> tuple[type, ...]:
    """The classes of layers that a model may have in the place of attention."""
    return (Attention,)

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns projections of a layer of attention that have no low-rank factors."""
    return ()

  def named_weights(self) -> list[NamedWeight]:
    """Returns the weights of the model with peft's names; UserError if peft has no names."""
    # not self.replaced, which asks for all values, and so for TRAINABLE_VARIABLES
    stated = {name: value for name, value in vars(self).items() if name.isupper()}
    plain = type(self)(**stated | dict(USE_LORA=False, LORA_MODULES_TO_SAVE=[]))
    found: list[NamedWeight] = extensions.hook('LORA_TARGETS')(plain)
    return found

  def _factors(self, rank: int, alpha: float | None) -> FactorSize:
    return FactorSize(rank, (alpha or rank) / (math.sqrt(rank) if self.LORA_RS else rank))

  def factors_by_name(self) -> dict[str, FactorSize]:
    """Returns the factors of each weight that LORA_TARGETS and the other attributes choose.

    Raises:
      UserError: An attribute names no weight, or a weight that has no factors.
    """
    names = self.named_weights()
    for text in self.LORA_TARGETS:
      kinds = {name.kind for name in names if name.is_named(text)}
      if kinds == {'whole'}:
        raise UserError(
          f'LORA_TARGETS: {text!r} is no matrix of a layer, and has no factors: '
          'LORA_MODULES_TO_SAVE trains it whole'
        )
    chosen = self._found(self.LORA_TARGETS or [_EVERY], names, 'LORA_TARGETS')
    chosen = [name for name in chosen if name.kind != 'whole']
    if self.LORA_LAYERS:
      number = lambda name: int(m[1]) if (m := re.match(r'.*?\.(\d+)\.', name.theirs)) else -1
      chosen = [name for name in chosen if number(name) in self.LORA_LAYERS]
      if absent := {*self.LORA_LAYERS} - {*map(number, chosen)}:
        raise UserError(
          f'LORA_LAYERS={self.LORA_LAYERS}: layer {min(absent)} has none of the weights of '
          'LORA_TARGETS: layers are numbered from 0'
        )
    ranks = _pattern(self.LORA_RANK_PATTERN, 'LORA_RANK_PATTERN', chosen)
    alphas = _pattern(self.LORA_ALPHA_PATTERN, 'LORA_ALPHA_PATTERN', chosen)
    return {
      name.theirs: self._factors(
        int(ranks.get(name.theirs, self.LORA_RANK)), alphas.get(name.theirs, self.LORA_ALPHA)
      )
      for name in chosen
    }

  def _found(
    self, texts: Sequence[str], names: Sequence[NamedWeight], attribute: str
  ) -> list[NamedWeight]:
    """Returns the weights that any of `texts` names; UserError if one names none."""
    for text in texts:
      if _IS_EXPRESSION.search(text):
        compiled(text, attribute)
      if not any(name.is_named(text) for name in names):
        last = sorted({name.theirs.rpartition('.')[2] for name in names})
        raise UserError(
          f'{attribute}: {text!r} is the name of no weight of {type(self).__name__}, which has '
          f'{listed(last, shown=12)}. {did_you_mean(text, last)}'.rstrip()
        )
    return [name for name in names if any(map(name.is_named, texts))]

  def factors_of(self, names: Iterable[str]) -> dict[str, FactorSize]:
    """Returns the factors of weights that have some, by peft's names."""
    if self._chooses:
      found = self.factors_by_name()
      return {name: found.get(name, FactorSize(0, 1.0)) for name in names}
    return dict.fromkeys(names, self._factors(self.LORA_RANK, self.LORA_ALPHA))

  def factors_at(self, module: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the ranks and the scales of the parts of a module of an unrolled stack."""
    if (chosen := self._chosen()) is not None:
      return chosen_at(chosen, module.split('/'))
    factors = self._factors(self.LORA_RANK, self.LORA_ALPHA)
    return (factors.rank,), (factors.scale,)

  @property
  def _chooses(self) -> bool:
    return bool(
      self.LORA_TARGETS or self.LORA_LAYERS or self.LORA_RANK_PATTERN or self.LORA_ALPHA_PATTERN
    )

  def _chosen(self) -> tuple[Chosen, ...] | None:
    """Returns the factors of modules, by regular expressions of their paths; None: of all alike."""
    if not self._chooses:
      return None
    factors = self.factors_by_name()
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
      if self.has_repeated_stack:
        raise UserError(
          'LORA_LAYERS, LORA_TARGETS or patterns give layers different factors, and a repeated '
          f'stack has one array for all layers: USE_REPEATED_LAYER=False (of {stack})'
        )
      if len({_columns(sizes)[0] for sizes in kinds}) < len(kinds):  # a trace is of equal shapes
        raise UserError(
          f'LORA_ALPHA_PATTERN gives layers of one rank different alphas ({stack}): give such '
          'weights one alpha, or ranks that differ too'
        )
      found += [(ours, *_columns(sizes)) for ours, sizes in layers.items()]
    return tuple(entry for entry in found if any(entry[1]))

  def validate(self) -> None:
    super().validate()
    if not self.USE_LORA:
      return
    tables = [p for p in self.whole_variables if p.startswith(('embedding', 'softmax'))]
    if self.LORA_TOKENS and tables:
      raise UserError('LORA_TOKENS and LORA_MODULES_TO_SAVE both train rows: leave one of them out')
    wrong = [i for i in self.LORA_TOKENS if not 0 <= i < (self.vocab_size or 0)]
    if wrong or len({*self.LORA_TOKENS}) < len(self.LORA_TOKENS):
      raise UserError(
        f'LORA_TOKENS={self.LORA_TOKENS} must be ids below VOCAB_SIZE={self.vocab_size}, each once'
      )
    if not self._chooses:
      return
    if self.num_stages > 1:
      raise UserError('LORA_TARGETS, LORA_LAYERS and patterns need a mesh without stages')
    experts = [name for name, *_ in self._chosen() or () if name.endswith('_factors')]
    if experts and (self.USE_DORA or self.LORA_DROPOUT):
      raise UserError(
        'LORA_TARGETS names experts, whose factors change the weights themselves, as in peft: '
        'USE_DORA=False LORA_DROPOUT=0'
      )


def names_of_factors() -> list[str]:
  """Returns the names of the attributes that decide which factors there are."""
  return [name for name in attribute_types(Adapters) if name.startswith('LORA_')]


def _columns(parts: Sequence[FactorSize]) -> tuple[tuple[int, ...], tuple[float, ...]]:
  return tuple(part.rank for part in parts), tuple(part.scale for part in parts)


def _pattern(
  texts: Sequence[str], attribute: str, names: Sequence[NamedWeight]
) -> dict[str, float]:
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
      raise UserError(f'{attribute}: {pattern!r} is the name of no weight that has factors')
    for name in matching:
      found.setdefault(name, value)
  return found
