"""peft's names of a model's weights, for LORA_TARGETS and others."""

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.families import hugging_face_entries
from paxlite.weights.tensor_entries import Entry

_EXPERTS = re.compile(r'(.*)/w_(in_gate|in|out)')
_EVERY = 'all-linear'  # peft's word for all weights of layers that are matrices
_IS_EXPRESSION = re.compile(r'[][*+?()|\\^$]')


class NamedWeight(NamedTuple):
  """A weight of a model with the name that peft has for it."""

  ours: str  # the variable; of a weight that may have factors, the module that has them
  part: int | None  # its index in a variable that combines queries, keys and values, or None
  theirs: str  # the module of transformers, or the parameter of experts
  # what it may have: factors of a projection or of experts; other weights are trained whole
  kind: Literal['linear', 'experts', 'whole']

  def is_named(self, text: str) -> bool:
    """Whether `text` names this weight in peft, or ends paxlite's name."""
    if text == _EVERY:
      return self.kind == 'linear'
    if _IS_EXPRESSION.search(text):
      return re.fullmatch(text, self.theirs) is not None
    if self.kind == 'experts' and text == 'experts':
      return True
    own = re.sub(r'/(w|scale|emb_var)$', '', self.ours)
    return f'.{self.theirs}'.endswith(f'.{text}') or f'/{own}'.endswith(f'/{text}')


_kept: dict[str, list[NamedWeight]] = {}  # of the last model


def named_weights(e: LanguageModel) -> list[NamedWeight]:
  """Returns the weights of a model without factors, each with its name in transformers 5.

  Raises UserError if the experiment belongs to no family that Hugging Face has.
  """
  key = f'{type(e).__mro__} {e.model_values} {e.USE_REPEATED_LAYER}'
  if key not in _kept:
    names = [*dict.fromkeys(_named(e))]
    _kept.clear()
    _kept[key] = names
  return _kept[key]


def _named(e: LanguageModel) -> Iterator[NamedWeight]:
  for entry in hugging_face_entries(e):
    if found := experts_of(e, entry):
      yield NamedWeight(found[0], None, found[1], 'experts')
      continue
    is_matrix = entry.ours.startswith('transformer/') and len(entry.shape) == 2
    if is_matrix and entry.ours.endswith('/w'):
      stem = entry.ours.removesuffix('/w')
      yield NamedWeight(stem, entry.part, module_of(entry), 'linear')
    elif not entry.is_copy:
      yield NamedWeight(entry.ours, None, module_of(entry), 'whole')


def module_of(entry: Entry) -> str:
  """Returns the name of the module of transformers 5 that a tensor belongs to."""
  return _live(re.sub(r'\.(weight|bias)$', '', entry.theirs))


def experts_of(e: LanguageModel, entry: Entry) -> tuple[str, str] | None:
  """Returns the module with the factors of experts' weights, and peft's name of the parameter.

  transformers 5 has one parameter for all experts of a layer, and one for gates and the products
  beside them, whatever the files have.
  """
  match = _EXPERTS.fullmatch(entry.ours)
  if match is None:
    return None
  experts = _live(entry.theirs.partition('.experts.')[0]) + '.experts'
  if match[2] == 'out':
    return f'{match[1]}/out_factors', f'{experts}.down_proj'
  ups = 'gate_up_proj' if options.value(e, 'USE_GATED_EXPERTS') else 'up_proj'
  return f'{match[1]}/in_factors', f'{experts}.{ups}'


def short_names(chosen: Collection[str], names: Collection[str], whole: bool = False) -> list[str]:
  """Returns the ends of the names in `chosen` that are ends of no other names.

  An end is the last word, or all behind the number of the layer, or the whole name.

  Args:
    chosen: Some of `names`.
    names: The names of all weights.
    whole: Whether an end may not be the last word alone.
  """
  last, behind = (lambda n: n.rpartition('.')[2]), (lambda n: re.split(r'\.\d+\.', n)[-1])
  ways = [behind] if whole else [last, behind]
  others = {*names} - {*chosen}
  found = []
  for name in chosen:
    ends = (way(name) for way in ways)
    unique = (end for end in ends if not any(f'.{other}'.endswith(f'.{end}') for other in others))
    found.append(next(unique, name))
  return list(dict.fromkeys(found))


def _live(name: str) -> str:
  """Returns a name of transformers 5, which for Mixtral is not that of its files."""
  return name.replace('.block_sparse_moe', '.mlp')
