"""Checkpoints and imported weights to restore from, and the files next to them."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping

from paxlite import extensions
from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.checksums import CHECKSUMS, damage, fingerprint
from paxlite.checkpointing.foreign_weights import formats_at, way_of_gguf
from paxlite.checkpointing.variables import Variable, layer_of, stored_variables
from paxlite.config.experiment_file import EXPERIMENT, WeightsFacts, read_experiment
from paxlite.core.errors import AbsentError, UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.variable_names import REPEATED
from paxlite.data import tokenizer_copies
from paxlite.data.tokenizer import TOKENIZERS
from paxlite.files import paths, schemes
from paxlite.files.json_files import read_object
from paxlite.files.schemes import complete, is_address

log = logging.getLogger('paxlite')

_PARAMS = 'params'
# of optim.averaging.Averaged
_AVERAGE, _NUM_AVERAGED = 'opt_state/average/', 'opt_state/num_averaged'


@dataclasses.dataclass(frozen=True)
class Source:
  """A checkpoint on disk."""

  folder: pathlib.Path  # folder with state/ and checksums.json
  # path of the experiment.json of the run or tool that wrote it; it may not exist
  experiment: pathlib.Path
  # folder of the frozen base weights of a LoRA checkpoint, if they were moved; '' means the
  # CHECKPOINT_RESTORE_PATH of its experiment
  base: str = ''

  @functools.cached_property
  def written_by(self) -> JsonObject:
    """The experiment that wrote it, as core.experiment_file.read_experiment returns it."""
    return read_experiment(self.experiment)

  @functools.cached_property
  def variables(self) -> dict[str, Variable]:
    """All stored variables by name: 'params/embedding/emb_var', 'opt_state/1/m/…', 'step'.

    A LoRA run saves only the parameters that it trains, factors and others that were named. In this
    case the frozen parameters of its base checkpoint are included here too.
    """
    return self._variables(())

  def _variables(self, beside: tuple[pathlib.Path, ...]) -> dict[str, Variable]:
    """Returns `variables`; `beside` are the folders of the LoRA checkpoints that led here."""
    own = stored_variables(self.folder / 'state')
    weights = {re.sub(r'/w(/.*)?$', '', k) for k in own if re.search(r'/w(/[^/]*)?$', k)}
    factors = [k for k in own if k.startswith(f'{_PARAMS}/') and k.endswith('/lora_a')]
    stems = (k.removesuffix('/lora_a') for k in factors)
    of = lambda stem: re.sub('/(in|out)_factors$', r'/w_\1', stem)  # of experts
    if all(stem in weights or of(stem) in own for stem in stems):
      return own
    path = self.base or self.written_by['values'].get('CHECKPOINT_RESTORE_PATH')
    if not path:
      raise UserError(f'{self.folder} holds LoRA factors without their base weights')
    try:
      base = find_source(path, frozen=self.frozen)
    except UserError as e:
      raise UserError(
        f'{self.folder} holds LoRA factors, which need their base weights: {e}. If they were '
        'moved: --base_weights=FOLDER'
      ) from None
    beside = (*beside, self.folder.resolve())
    if base.folder.resolve() in beside:
      raise _circular(self.experiment)
    return _untrained(_weights(base._variables(beside)), own) | own

  @functools.cached_property
  def weights(self) -> dict[str, Variable]:
    """The parameters as evaluations take them: 'params/…'; see `_weights`."""
    return _weights(self.variables)

  @property
  def tokenizer(self) -> pathlib.Path | None:
    """The tokenizer (a file, or a folder that contains one), or None if there never was one.

    Raises UserError if it was in a folder that is gone.
    """
    found = tokenizer_of(self.folder, self.base)
    values = self.written_by['values'] if self.experiment.is_file() else {}
    was_in = values.get('VOCAB_PATH') or values.get('CHECKPOINT_RESTORE_PATH')
    if found is None and was_in and not is_address(was_in) and not os.path.exists(was_in):
      raise UserError(
        f'the tokenizer of {self.folder} was in {was_in}, which does not exist: if it was moved, '
        'name the weights with --base_weights=FOLDER, or the tokenizer with --tokenizer (not in '
        'export)'
      )
    return found

  @property
  def frozen(self) -> int | None:
    """The fingerprint of LoRA's frozen base weights, as StateStore writes it."""
    return read_object(self.folder / 'data' / 'metadata').get('frozen')

  def unrolled_params(self) -> dict[str, Variable]:
    """Returns the parameters by name ('embedding/emb_var'), a repeated stack as single layers."""
    found = {}
    for name, variable in self.weights.items():
      short = name.partition('/')[2]
      before, repeated, after = short.partition(f'{REPEATED}/')
      if repeated:
        for i in range(variable.shape[0]):
          found[f'{before}x_layers_{i}/{after}'] = layer_of(variable, i)
      else:
        found[short] = variable
    return found

  @functools.cached_property
  def fingerprint(self) -> int:
    """The fingerprint of the checkpoint, computed from its checksums."""
    found = fingerprint(self.folder)
    if found is None:
      raise UserError(f'{self.folder / CHECKSUMS} is missing')
    return found


def _weights(variables: Mapping[str, Variable]) -> dict[str, Variable]:
  """Returns the parameters of a checkpoint; where it has an average of them, that (EMA_DECAY)."""
  found = {k: v for k, v in variables.items() if k.startswith(f'{_PARAMS}/')}
  if _NUM_AVERAGED in variables and variables[_NUM_AVERAGED].whole() > 0:
    for name, variable in variables.items():
      if name.startswith(_AVERAGE):
        found[f'{_PARAMS}/{name.removeprefix(_AVERAGE)}'] = variable
  return found


def _untrained(base: Mapping[str, Variable], own: Mapping[str, Variable]) -> dict[str, Variable]:
  """Returns the variables of `base` that `own` does not replace under another name.

  A run that continues factors may have one array for the layers where its base has one for each,
  or the reverse. It may train some of the layers: the others are the base's.
  """
  found: dict[str, Variable] = {}
  for name, variable in base.items():
    before, repeated, after = name.partition(f'/{REPEATED}/')
    layers = [f'{before}/x_layers_{i}/{after}' for i in range(variable.shape[0] if repeated else 0)]
    if not own.keys().isdisjoint(layers):
      found |= {layer: layer_of(variable, i) for i, layer in enumerate(layers)}
    elif re.sub(r'/x_layers_\d+/', f'/{REPEATED}/', name, count=1) not in own:
      found[name] = variable
  return found


def find_source(path: str | pathlib.Path, base: str = '', frozen: int | None = None) -> Source:
  """Returns the checkpoint at `path`.

  Raises UserError if there is no such checkpoint, or it is damaged.

  Args:
    path: Folder of imported weights, a job_log_dir (its newest good step is used), or one step.
    base: Folder of the frozen base weights of a LoRA checkpoint, if they were moved.
    frozen: Fingerprint of the checkpoint to find, at any step; None finds the newest good one.
  """
  folders = _checkpoint_folders(path)
  if frozen is not None:
    folders = [f for f in folders if fingerprint(f) == frozen]
    if not folders:
      raise UserError(f'{path} does not hold the frozen weights that this run began with')
  problems = []
  for folder in folders:
    complete(folder)
    problem = damage(folder)
    if problem is None:
      return Source(folder, _experiment_file(folder), base)
    log.warning('%s: %s', folder, problem)
    problems.append(f'{folder}: {problem}')
  raise UserError('; '.join(problems))


def tokenizer_of(path: str | pathlib.Path, base: str = '') -> pathlib.Path | None:
  """Returns the tokenizer of a checkpoint (a file, or a folder that contains one), or None.

  The function looks next to the weights, at the copy that the run which wrote them has kept, and at
  its VOCAB_PATH, then in the same way for the checkpoint from which it started. For '' it is None.
  Raises UserError if the experiment.json of such a run is damaged.

  Args:
    path: The checkpoint.
    base: The weights that the run started from, if they were moved.
  """
  with contextlib.suppress(AbsentError):
    for source in lineage(path):
      if found := _own_tokenizer(source):
        return found
  return tokenizer_of(base) if base else None


def weights_facts(path: str) -> WeightsFacts:
  """Returns what is known of the weights at `path`, of which no array is read."""
  first: JsonObject = {'experiment': '', 'values': {}}
  tokenizer, problem = None, ''
  try:
    for number, source in enumerate(lineage(path)):
      tokenizer = tokenizer or _own_tokenizer(source)
      first = first if number else source.written_by
      if tokenizer:
        break
  except UserError as e:  # whoever needs the weights says what is wrong with them
    problem = str(e)
  return WeightsFacts(path, first['experiment'], first['values'], str(tokenizer or ''), problem)


def lineage(path: str | pathlib.Path) -> Iterator[Source]:
  """Yields the checkpoint at `path`, then the one that its run started from, and so on.

  Of several at a path it is the one whose weights a LoRA run has frozen, or else the newest.

  Raises:
    AbsentError: One of them is not there, or does not say which run wrote it.
    UserError: An experiment.json is damaged.
  """
  seen: set[pathlib.Path] = set()
  frozen: int | None = None
  while str(path):
    try:
      folders = _checkpoint_folders(path)
    except UserError as e:
      raise AbsentError(str(e)) from None
    begun = (f for f in folders if frozen is not None and fingerprint(f) == frozen)
    folder = next(begun, folders[0])
    source = Source(folder, _experiment_file(folder))
    if folder.resolve() in seen:
      raise _circular(source.experiment)
    seen.add(folder.resolve())
    yield source
    if not source.experiment.is_file():
      raise AbsentError(f'{source.experiment} is missing')
    path, frozen = source.written_by['values'].get('CHECKPOINT_RESTORE_PATH') or '', None
    with contextlib.suppress(UserError):  # imported weights have none
      frozen = source.frozen


def _own_tokenizer(source: Source) -> pathlib.Path | None:
  """Returns the tokenizer next to a checkpoint, or of the run that wrote it, or None."""
  if any((source.folder / name).is_file() for name in TOKENIZERS):
    return source.folder
  if own := tokenizer_copies.kept(source.experiment.parent):
    return own
  vocab = source.written_by['values'].get('VOCAB_PATH') if source.experiment.is_file() else None
  if vocab and (is_address(vocab) or os.path.exists(vocab)):
    return pathlib.Path(schemes.local(vocab, schemes.SMALL))
  return None


def _circular(experiment: pathlib.Path) -> UserError:
  return UserError(f'{experiment} is damaged: its chain of CHECKPOINT_RESTORE_PATH is a circle')


def _checkpoint_folders(path: str | pathlib.Path) -> list[pathlib.Path]:
  """Returns the checkpoint folders at `path`, the newest first, without reading their files."""
  given = paths.stored(str(path))
  if is_address(given):
    return schemes.scheme_of(given).checkpoints(given)
  if copies := extensions.hint('weights', given):
    return [pathlib.Path(copy) for copy in copies]
  path = pathlib.Path(given).absolute()
  if not os.path.isdir(path):  # False also for strings that cannot be a path
    raise UserError(
      f'{path} is not a folder: it must be a job_log_dir or imported weights{_importing(given)}'
    )
  for folder in (path / 'checkpoints', path):
    checkpoints = Checkpoints(folder, read_only=True)
    if steps := checkpoints.steps():
      return [checkpoints.folder(step) for step in reversed(steps)]
  if (path / 'state').is_dir():
    return [path]
  raise UserError(
    f'{path} holds no weights: neither checkpoints/ of a run nor state/ of imported ones'
    f'{_importing(given)}'
  )


def _importing(path: str) -> str:
  """Returns a hint for a path without paxlite weights: how to import weights of others."""
  tool = 'paxlite import'
  names = [path] if os.path.isfile(path) else os.listdir(path) if os.path.isdir(path) else []
  for source, what, _ in formats_at(path)[:1]:
    name = re.sub(r'\W+', '-', pathlib.Path(path).stem.lower()).strip('-') or 'imported'
    command = f'{tool} --from={source} --path={shlex.quote(path)} --to=weights/{name}'
    return f'. These are weights of {what}, to be imported: {command}'
  if way := way_of_gguf(path):
    return f'. {way}'
  return f'. Weights of other formats are read by {tool}' if names else ''


def _experiment_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the path of experiment.json.

  It is next to imported weights. A run has it two folders above its checkpoint_00000100.
  """
  of_run = folder.parent.name == 'checkpoints' and not (folder / EXPERIMENT).exists()
  return (folder.parents[1] if of_run else folder) / EXPERIMENT
