"""Adapters on disk: FOLDER/RUN/weights/NAME, and sampler_weights/NAME without Adam's moments.

Such a folder is an adapter of peft. `state.safetensors` has the factors and the moments under the
names of paxlite, which the server reads, and `state.json` what kind of adapter it is.
"""

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import optax

from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_object
from paxlite.training_api.adapted_model import AdaptedModel, AdapterKind, Arrays
from paxlite.weights.huggingface import header
from paxlite.weights.lora import write_adapter
from paxlite.weights.safetensors_file import tensors_in
from paxlite.weights.unfinished_folder import unfinished_folder

_SCHEME = 'tinker://'
_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}')
_STATE, _TENSORS = 'state.json', 'state.safetensors'
TRAINING, SAMPLER = 'weights', 'sampler_weights'  # as paths have them
_MOMENTS = 'mu', 'nu'


class SavedAdapters:
  """The folder of saved adapters.

  Args:
    folder: The folder.
    base: The fingerprint of the base model that they belong to.
  """

  def __init__(self, folder: pathlib.Path, base: int):
    self._folder, self._base = folder, base

  def path(self, run: str, place: str, name: object) -> str:
    """Returns the path of a name, as clients have it; raises UserError if it is no name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise UserError(
        f'the name {name!r} is not supported: use up to 200 letters, digits, ., _, : and -'
      )
    return f'{_SCHEME}{run}/{place}/{name}'

  def _folder_of(self, path: str) -> pathlib.Path:
    parts = path.removeprefix(_SCHEME).split('/')
    good = len(parts) == 3 and parts[1] in (TRAINING, SAMPLER) and all(map(_NAME.fullmatch, parts))
    if not good or not path.startswith(_SCHEME):
      raise UserError(f'{path!r} is not a path of saved weights, such as tinker://RUN/weights/NAME')
    return self._folder.joinpath(*parts)

  def save(
    self,
    path: str,
    model: AdaptedModel,
    factors: Arrays,
    moments: optax.ScaleByAdamState | None,
    overwrite: bool,
    metadata: JsonObject,
  ) -> None:
    """Writes an adapter, which appears under its path when it is complete.

    Raises:
      UserError: The path exists and may not be overwritten, or cannot be written.
    """
    final = self._folder_of(path)
    if final.exists() and not overwrite:
      raise UserError(f'{path} exists already: choose another name; save_state has overwrite=True')
    arrays = dict(jax.device_get(factors))
    variables = {k: Variable(x.shape, x.dtype, x.__getitem__) for k, x in arrays.items()}
    if moments is not None:
      count, *both = jax.device_get((moments.count, moments.mu, moments.nu))
      arrays['count'] = np.asarray(count, np.int64)
      for kind, moment in zip(_MOMENTS, both, strict=True):
        arrays |= {f'{kind}/{name}': x for name, x in moment.items()}
    state = dict(
      base=self._base, rank=model.kind.rank, layers=model.kind.layers, user_metadata=metadata
    )
    made = final.with_name(f'{final.name}.new') if final.exists() else final
    try:
      shutil.rmtree(made, ignore_errors=True)
      with unfinished_folder(made) as folder:
        adapter = folder / 'adapter'
        write_adapter(adapter, model.experiment, variables, model.base.origin, 'float32')
        for file in adapter.iterdir():
          file.rename(folder / file.name)
        adapter.rmdir()
        (folder / _STATE).write_text(json.dumps(state, indent=2) + '\n')
        with (folder / _TENSORS).open('wb') as f:
          f.write(header({n: (x.shape, x.dtype) for n, x in arrays.items()}))
          for x in arrays.values():
            f.write(np.ascontiguousarray(x).tobytes())
      if made != final:
        shutil.rmtree(final)
        made.rename(final)
    except OSError as e:
      raise UserError(f'{path} cannot be written: {e.strerror or e}') from None

  def kind(self, path: str) -> AdapterKind:
    """Returns the kind of a saved adapter.

    Raises:
      UserError: It does not exist, or belongs to another base model.
    """
    folder = self._folder_of(path)
    if not (folder / _STATE).is_file():
      raise UserError(f'{path} does not exist')
    state = read_object(folder / _STATE)
    if state.get('base') != self._base:
      raise UserError(f'{path} belongs to another base model than this server has')
    return AdapterKind(int(state['rank']), str(state['layers']))

  def load(
    self, path: str, model: AdaptedModel, with_moments: bool
  ) -> tuple[Arrays, optax.ScaleByAdamState | None]:
    """Returns the factors of a saved adapter, and its moments if they are wanted.

    Raises:
      UserError: It is of another kind than the model's, has no moments, or is damaged.
    """
    if (kind := self.kind(path)) != model.kind:
      raise UserError(f'{path} has {_said(kind)}, but this training client has {_said(model.kind)}')
    file = self._folder_of(path) / _TENSORS
    tensors = {tensor.name: tensor for tensor in tensors_in(str(file))}
    if with_moments and 'count' not in tensors:
      raise UserError(
        f'{path} has no optimizer state: load it without, or use a path of save_state'
      )

    def arrays(prefix: str) -> Arrays:
      found = {}
      for name, like in model.shapes.items():
        if (key := prefix + name) not in tensors or tensors[key].shape != like.shape:
          raise UserError(f'{file} is damaged: {key} is missing, or of another shape')
        found[name] = jax.device_put(tensors[key].read(), like.sharding)
      return found

    factors = arrays('')
    if not with_moments:
      return factors, None
    count = jax.numpy.asarray(tensors['count'].read().astype(np.int32))
    return factors, optax.ScaleByAdamState(count, *(arrays(f'{m}/') for m in _MOMENTS))


def _said(kind: AdapterKind) -> str:
  return f'factors of rank {kind.rank} in {kind.layers} layers'
