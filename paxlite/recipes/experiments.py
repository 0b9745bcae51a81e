"""The experiments of a recipe's stages: built and compared before any of them runs."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping

import fiddle as fdl
import jax
from flax.linen import meta

from paxlite.checkpointing.source import weights_facts
from paxlite.config.attributes import attribute_types
from paxlite.config.experiment_file import WeightsFacts
from paxlite.config.placed_paths import is_of_paths
from paxlite.core import shell
from paxlite.core.errors import UserError, listed, located
from paxlite.core.trees import PyTree
from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
from paxlite.eval.eval_tasks import find_tasks
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.compatibility import differences, function_lines
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.schemes import is_address
from paxlite.files.text_files import expanded
from paxlite.parallel.quantized_weights import num_parameters
from paxlite.programs.launch import build_experiment
from paxlite.recipes.recipe import Recipe, Stage, placed, text_of
from paxlite.training.task import Task

_FROM = 'CHECKPOINT_RESTORE_PATH'
_READ = 'VOCAB_PATH', 'DATASET_PATH', _FROM  # paths of one file or folder that a run reads


@dataclasses.dataclass(frozen=True)
class Needs:
  """The experiment and inputs of a stage."""

  parameters: int  # their number
  tokens: int | None  # the tokens of all steps; None: the data say how many steps there are
  flops: float | None  # the model FLOPs of all steps; None as well
  bytes: int  # the bytes of its checkpoints on the disk, as long as it runs


def values_of(recipe: Recipe, stage: Stage, folder: pathlib.Path) -> dict[str, str]:
  """Returns the values of a stage as texts of a command line, with the folders of others."""
  folders = {name: str(folder / name) for name in recipe.stages}
  texts = {name: text_of(placed(value, folders)) for name, value in stage.values.items()}
  return texts | ({_FROM: folders[stage.starts_from]} if stage.starts_from else {})


def built(recipe: Recipe, folder: pathlib.Path) -> dict[str, Experiment]:
  """Returns the experiments of the stages that train, by name.

  Raises UserError if a value is not valid, a file is missing that no stage makes, or a stage cannot
  start from the one that it names.

  Args:
    folder: Its folder, in which nothing has to be yet.
  """
  found: dict[str, Experiment] = {}
  for name, stage in recipe.stages.items():
    if not isinstance(stage, Stage):
      continue
    before = found.get(stage.starts_from or '')
    known = {str(folder / n): _facts(str(folder / n), e) for n, e in found.items()}
    with located(f'stage {name}'):
      e = build_experiment(
        stage.class_name,
        [],
        values_of(recipe, stage, folder),
        known_weights=lambda path, known=known: known.get(path) or weights_facts(path),  # type: ignore[misc]
      )
      files_of(e, folder)
    if before is not None:
      with located(f'stage {name} cannot start from {stage.starts_from}'):
        _check_start(e, before)
    found[name] = e
  return found


def _facts(path: str, e: Experiment) -> WeightsFacts:
  """Returns the facts about the weights that an experiment will write to a path."""
  tokenizer = e.tokenizer_path or e.facts_of(e.CHECKPOINT_RESTORE_PATH).tokenizer
  return WeightsFacts(path, full_name(type(e)), e.values(), tokenizer)


def _check_start(e: Experiment, before: Experiment) -> None:
  """Raises UserError if an experiment cannot begin with the weights of another one."""
  shapes, theirs = (x.model_values[0] for x in (e, before))
  other = {k: theirs[k] for k, v in shapes.items() if k in theirs and theirs[k] != v}
  if other and not e.CHECKPOINT_IGNORE_RULES:
    ours = shell.flags({k: shapes[k] for k in other})
    raise UserError(f'it has {ours}, but the weights have {shell.flags(other)}')
  lines = function_lines(before.plain.build_task().model)
  different = differences(lines, function_lines(e.plain.model_of(before)))
  if different and not (other or e.CHECKPOINT_RESTORE_CHANGES):
    raise UserError(f'its model computes something else: {listed(different, shown=3)}')
  one, two = e.tokenizer_path, before.tokenizer_path
  if one and two and not _same_tokens(one, two):
    raise UserError(f'its tokenizer is {one}, but the weights have {two}')
  of_chats = (x for x in (e, before) if isinstance(x, LanguageModel) and x.learns_chats)
  templates = [x.CHAT_TEMPLATE for x in of_chats]
  if len(set(templates)) == 2:
    raise UserError('its CHAT_TEMPLATE differs from the one in training')


def _same_tokens(one: str, two: str) -> bool:
  if os.path.realpath(one) == os.path.realpath(two):
    return True
  if not (os.path.exists(one) and os.path.exists(two)):
    return False  # which stages make
  return vocabulary_fingerprint(open_tokenizer(one)) == vocabulary_fingerprint(open_tokenizer(two))


def files_of(e: Experiment, folder: pathlib.Path) -> list[str]:
  """Returns the local files and folders that an experiment reads, without those of stages.

  Raises UserError if one is missing.
  """
  types, found = attribute_types(type(e)), list[str]()
  for name, value in e.values().items():
    given = value if isinstance(value, list) else [value] if name in _READ and value else []
    if not is_of_paths(types[name]):
      continue
    paths = [str(path) for path in given if f'{folder}{os.sep}' not in str(path)]
    if name == 'EVAL_TASKS':
      paths = [p for text in paths for p in _files_of_task(text)]
    with located(name):
      found += expanded([p.removeprefix('sft:') for p in paths if not _is_elsewhere(p)])
  for path in found:
    if not os.path.exists(path):
      raise UserError(f'{path} is missing')
  return sorted(set(found))


def _files_of_task(text: str) -> list[str]:
  files = [f for _, spec in find_tasks(text) for f in (*spec.files, *spec.fewshot_files)]
  return [*files, *([text] if text.endswith('.json') else [])]


def _is_elsewhere(path: str) -> bool:
  return is_address(path) or path.startswith(('hf:', 'tfds:', 'seqio:'))


def needs_of(e: Experiment) -> Needs:
  """Returns the cost of training an experiment, without allocating anything."""
  task: Task = fdl.build(e.build_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  state = meta.unbox(boxed)
  saved = task.optimizer.split(state.params)[0] if e.saves_trainable_only else state.params
  of_checkpoint = _bytes(saved) + _bytes(state.opt_state)
  kept = min(e.CHECKPOINT_MAX_TO_KEEP, math.ceil(e.MAX_STEPS / e.CHECKPOINT_EVERY_N_STEPS))
  parameters = num_parameters(boxed.params)
  if e.NUM_EPOCHS is not None:
    return Needs(parameters, None, None, (kept + 1) * of_checkpoint)
  tokens = e.MAX_STEPS * e.batch_size * e.MAX_SEQ_LEN
  flops = tokens * e.trained_flops(task.optimizer, boxed.params)
  return Needs(parameters, tokens, flops, (kept + 1) * of_checkpoint)  # one more while it is saved


def _bytes(tree: PyTree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def shown(needs: Mapping[str, Needs], name: str) -> list[str]:
  """Returns the cells of a stage in a table: parameters, tokens, FLOPs and bytes."""
  found = needs.get(name)
  if found is None:
    return ['', '', '', '']
  tokens = '?' if found.tokens is None else f'{found.tokens:,}'
  flops = '?' if found.flops is None else f'{found.flops:.3g}'
  return [f'{found.parameters:,}', tokens, flops, f'{found.bytes:,}']
