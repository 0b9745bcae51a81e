"""Imports Pax's checkpoints with Adam's state, so that a Pax run can be resumed in paxlite.

    checkpoint_00001000/state/mdl_vars.params.lm.transformer.x_layers_0.…/{.zarray, 0.0}
    checkpoint_00001000/state/opt_states_0_2.m.params.lm.…
    checkpoint_00001000/state/step

A repeated stack has the name repeat.sub.x_layers_0 and a leading layer axis. Its moments are under
opt_states_0.p_<repeats>_i-1_2, and the moments of the other parameters are then under
opt_states_0.no_prefix_2.
"""

import pathlib
import re
from collections.abc import Callable, Mapping

import jax
import numpy as np

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.variables import Variable, stored_variables, transposed, write_variable
from paxlite.core.errors import UserError, listed
from paxlite.core.variable_names import path_name
from paxlite.experiments.language_model import LanguageModel
from paxlite.training.train_state import TrainState
from paxlite.weights.folder import write_identity
from paxlite.weights.unfinished_folder import unfinished_folder

_PARAMS = 'mdl_vars.params.'
_HEAD = 'lm.softmax.logits_ffn.linear.w'  # [D, V] in Pax, [V, D] in paxlite
_MOMENT = re.compile(
  r'(?P<state>opt_states_0(?:\.(?:no_prefix|p_[^.]*))?_\d+)\.(?P<kind>[mv])\.params\.(?P<name>.+)'
)

# Replacements, applied in this order, that turn paxlite's name into Pax's.
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
  # Pax adds A·Bᵀ to post's w [D, N, H] without a transposition. Pax's A therefore has dimension D,
  # as B has in paxlite.
  (r'/post/lora_a$', '/post/lora_swapped'),
  (r'/post/lora_b$', '/post/lora_a'),
  (r'/post/lora_swapped$', '/post/lora_b'),
]


def pax_name(ours: str, tied: bool) -> str:
  """Returns Pax's name of a variable: 'lm.transformer.x_layers_0.self_attention.post.w'.

  Args:
    ours: paxlite's name of the variable, with '/' between the parts.
    tied: Whether the embedding is also the model's head.
  """
  if tied and ours == 'embedding/emb_var':
    return _HEAD
  for pattern, replacement in _RULES:
    ours = re.sub(pattern, replacement, ours)
  return f'lm/{ours}'.replace('/', '.')


def import_checkpoint(
  path: pathlib.Path,
  to: pathlib.Path,
  experiment: LanguageModel,
  abstract: TrainState,
  report: Callable[[int, int], None],
  params_only: bool = False,
) -> tuple[int, int | None]:
  """Writes a Pax checkpoint as a folder of weights; a failure leaves no folder behind.

  Raises UserError if variables are missing, left over or of another shape; the message names them.

  Args:
    path: The folder checkpoint_%08d of Pax.
    to: The folder to write, which must not exist.
    experiment: The experiment of the model, which Pax's checkpoints do not name.
    abstract: The shapes of a train state of the experiment.
    report: Called with the number of variables done and the number of all variables.
    params_only: Whether Adam's state is left out, for instance if the checkpoint lacks parts of it.

  Returns:
    Bytes of the variables, and the step, or None if Adam's state was not imported.
  """
  state = path / 'state'
  if not state.is_dir():
    raise UserError(f'{path} holds no state/: --path must be a checkpoint_%08d of Pax')
  stored = stored_variables(state, separator='.')
  found = {('', k.removeprefix(_PARAMS)): v for k, v in stored.items() if k.startswith(_PARAMS)}
  moments = {(m['kind'], m['name']): v for k, v in stored.items() if (m := _MOMENT.fullmatch(k))}
  if params_only:
    moments = {}
  sources = _matched(found | moments, abstract, experiment)
  scalars = _scalars(stored, abstract) if moments else {}
  size = 0
  with unfinished_folder(to) as folder:
    for i, (ours, variable) in enumerate(sources.items()):
      value = variable.whole()
      write_variable(folder / 'state', ours.replace('/', '.'), value)
      size += value.nbytes
      report(i + 1, len(sources))
    for ours, scalar in scalars.items():
      write_variable(folder / 'state', ours.replace('/', '.'), np.array(scalar, np.int32))
    write_identity(folder, experiment)
    write_checksums(folder)
  return size, scalars.get('step')


def _matched(
  stored: Mapping[tuple[str, str], Variable], abstract: TrainState, experiment: LanguageModel
) -> dict[str, Variable]:
  """Returns Pax's variables by paxlite's names ('params/…', 'opt_state/1/m/…') and layout.

  Args:
    stored: Pax's variables by kind ('' for parameters, 'm', 'v') and Pax's name.
    abstract: The shapes of a train state.
    experiment: The experiment of the train state.
  """
  with_moments = any(kind for kind, _ in stored)
  matched: dict[str, Variable] = {}
  problems: list[str] = []
  used = set()
  for path, like in jax.tree_util.tree_leaves_with_path(abstract):
    ours = path_name(path)
    parts = re.fullmatch(r'(?:params|opt_state/\d+/([mv]))/(.+)', ours)
    if parts is None or (parts[1] and not with_moments):
      continue
    kind, name = parts[1] or '', pax_name(parts[2], tied=not experiment.SEPARATE_EMBEDDING)
    used.add((kind, name))
    theirs = stored.get((kind, name))
    label = f"Adam's {kind} of {name}" if kind else name
    expected = like.shape[::-1] if name == _HEAD else like.shape
    if theirs is None:
      problems.append(f'{label} is missing')
    elif theirs.shape != expected:
      problems.append(f'{label} is {list(theirs.shape)} and the model has {list(expected)}')
    else:
      matched[ours] = transposed(theirs) if name == _HEAD else theirs
  problems += [f'{name} is not in the model' for kind, name in stored.keys() - used if not kind]
  if problems:
    # A parameter that is missing has no moments either, so that naming the parameters is enough.
    first = [p for p in problems if not p.startswith("Adam's")]
    way_out = '' if first else '. --params_only reads the parameters alone'
    what = listed(first or problems)
    raise UserError(f'the checkpoint is not of {type(experiment).__name__}: {what}{way_out}')
  return matched


def _scalars(stored: Mapping[str, Variable], abstract: TrainState) -> dict[str, int]:
  """Returns the step and the counts of a train state.

  Pax stores the number of Adam's updates next to the moments.
  """
  number = lambda name: int(stored[name].whole().flat[0])
  step = number('step')
  adam = {f'{m["state"]}.count' for k in stored if (m := _MOMENT.fullmatch(k))}
  counts = [number(k) for k in sorted(adam & stored.keys())]
  updates = counts[0] if counts else step
  names = (path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(abstract))
  found = {n: updates for n in names if n.endswith('/count')}
  return found | {'step': step, 'skipped': step - updates, 'skipped_in_a_row': 0}
