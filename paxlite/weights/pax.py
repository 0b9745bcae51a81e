"""Pax's own checkpoints, parameters and Adam's state: a Pax user's run goes on here.

    checkpoint_00001000/state/mdl_vars.params.lm.transformer.x_layers_0.…/{.zarray, 0.0}
    checkpoint_00001000/state/opt_states_0_2.m.params.lm.…
    checkpoint_00001000/state/step

Repeated stacks keep repeat.sub.x_layers_0 with a leading layer axis, and their moments under
opt_states_0.p_<repeats>_i-1_2 with the others' under opt_states_0.no_prefix_2.
"""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paxlite.checkpoints import write_checksums
from paxlite.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.optimizers import path_name
from paxlite.train_state import TrainState
from paxlite.variables import UnfinishedFolder, Variable, stored_variables, write_variable
from paxlite.weights.folder import write_identity

_PARAMS = 'mdl_vars.params.'
_MOMENT = re.compile(r'opt_states_0(?:\.(?:no_prefix|p_[^.]*))?_\d+\.([mv])\.params\.(.+)')
_COUNT = re.compile(r'opt_states_0(?:\.(?:no_prefix|p_[^.]*))?_(\d+)\.count')
_SHOWN = 8

# our name → Pax's, in order; Pax's parts are separated by '/'
_RULES = [
  (r'^transformer/repeat/', 'transformer/repeat/sub/x_layers_0/'),
  (r'^embedding/emb_var$', 'embedding_lookup/emb_var'),
  (r'^softmax/w$', 'softmax/logits_ffn/linear/w'),
  (r'^logits_bias/b$', 'softmax/logits_ffn/bias/b'),
  (r'/ff_layer_norm/', '/ff_layer/layer_norm/'),
  (r'(/ffn_layer\d(?:_gate)?)/b$', r'\1/bias/b'),
  (r'(/ffn_layer\d(?:_gate)?)/(w|lora_a|lora_b)$', r'\1/linear/\2'),
  (r'/qkv/combined/', '/combined_qkv/'),
  (r'/qkv/', '/'),
  # Pax adds A·Bᵀ to post's w [D, N, H] as it is, so that its A is what writes D: our B
  (r'/post/lora_a$', '/post/lora_swapped'),
  (r'/post/lora_b$', '/post/lora_a'),
  (r'/post/lora_swapped$', '/post/lora_b'),
]


def pax_name(ours: str, tied: bool) -> str:
  """What Pax calls a variable: 'lm/transformer/x_layers_0/self_attention/post/w'.

  Args:
    ours: Its name here.
    tied: Whether the model has no head of its own.
  """
  if tied and ours == 'embedding/emb_var':
    return 'lm/softmax/logits_ffn/linear/w'
  for pattern, replacement in _RULES:
    ours = re.sub(pattern, replacement, ours)
  return f'lm/{ours}'


def is_transposed(pax: str) -> bool:
  """Whether Pax stores a variable of this name transposed: the vocabulary's [D, V]."""
  return pax == 'lm/softmax/logits_ffn/linear/w'


def import_checkpoint(
  path: pathlib.Path,
  to: pathlib.Path,
  experiment: LanguageModel,
  abstract: TrainState,
  report: Callable[[int, int], None],
) -> tuple[int, int | None]:
  """Writes a Pax checkpoint as a folder of weights; on any failure nothing is left.

  Args:
    path: checkpoint_%08d of Pax.
    to: Must not exist.
    experiment: The model; Pax's checkpoints do not say it.
    abstract: The shapes of a state of it.
    report: Called with the variables done, and all.

  Returns:
    Bytes, and the step where Adam's state was there too.

  Raises:
    UserError: variables are missing, left over or of another shape: they are named.
  """
  state = path / 'state'
  if not state.is_dir():
    raise UserError(f'{path} holds no state/: --path must be a checkpoint_%08d of Pax')
  stored = stored_variables(state, separator='.')
  found = {k.removeprefix(_PARAMS): v for k, v in stored.items() if k.startswith(_PARAMS)}
  moments = {m.groups(): v for k, v in stored.items() if (m := _MOMENT.fullmatch(k))}
  sources: dict[str, Variable] = {}  # by our full name
  problems: list[str] = []
  used: set[str] = set()

  def match(full: str, name: str, theirs: Variable | None, shape: tuple[int, ...]) -> None:
    if theirs is None:
      problems.append(f'{name} is missing')
      return
    expected = shape[::-1] if is_transposed(name.replace('.', '/')) else shape
    if theirs.shape != expected:
      problems.append(f'{name} is {list(theirs.shape)} and the model has {list(expected)}')
    sources[full] = theirs

  tied = not experiment.SEPARATE_EMBEDDING
  transposed = set()
  for key, like in jax.tree_util.tree_leaves_with_path(abstract):
    full = path_name(key)
    params = re.fullmatch(r'(?:params|opt_state/\d+/([mv]))/(.+)', full)
    if params is None or (params[1] and not moments):
      continue
    name = pax_name(params[2], tied).replace('/', '.')
    if is_transposed(name.replace('.', '/')):
      transposed.add(full)
    if params[1]:
      match(full, name, moments.get((params[1], name)), like.shape)
    else:
      used.add(name)
      match(full, name, found.get(name), like.shape)
  problems += [f'{name} is not in the model' for name in found.keys() - used]
  if problems:
    shown = '; '.join(sorted(problems)[:_SHOWN])
    more = f'; and {len(problems) - _SHOWN} more' if len(problems) > _SHOWN else ''
    raise UserError(f'{path} does not fit {type(experiment).__name__}: {shown}{more}')
  scalars = _scalars(stored, abstract) if moments else {}
  size = 0
  with UnfinishedFolder(to) as folder:
    for i, (full, variable) in enumerate(sources.items()):
      value = variable.whole()
      value = value.T if full in transposed else value
      write_variable(folder / 'state', full.replace('/', '.'), value)
      size += value.nbytes
      report(i + 1, len(sources))
    for full, scalar in scalars.items():
      write_variable(folder / 'state', full.replace('/', '.'), np.array(scalar, np.int32))
    write_identity(folder, experiment)
    write_checksums(folder)
  return size, scalars.get('step')


def _scalars(stored: dict[str, Variable], abstract: Any) -> dict[str, int]:
  """Step and counts of a state: Pax counts Adam's updates beside its moments."""
  step = int(stored['step'].whole().flat[0])
  adam = {m[1] for k in stored if (m := re.match(r'opt_states_0[^.]*?_(\d+)\.m\.', k))}
  adam |= {m[1] for k in stored if (m := re.match(r'opt_states_0\.[^.]*_(\d+)\.m\.', k))}
  counts = [
    int(v.whole().flat[0])
    for k, v in sorted(stored.items())
    if (m := _COUNT.fullmatch(k)) and m[1] in adam
  ]
  updates = counts[0] if counts else step
  names = (path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(abstract))
  found = {n: updates for n in names if n.endswith('/count')}
  return found | {'step': step, 'skipped': step - updates, 'skipped_in_a_row': 0}
