"""Meta's LLaMA checkpoints: params.json, and consolidated.*.pth, one file for each shard."""

import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of, located
from paxlite.core.json_files import read_object
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.weights.families import published
from paxlite.weights.layout import Entry, check_layers, decoder_entries
from paxlite.weights.tensor_names import META

IGNORED = r'rope\.freqs|layers\.\d+\.attention\.inner_attention\.rope\.freqs'

# The dimension that is split over the shards, by the last two parts of a tensor's name. Norms are
# not split: every shard holds all of them.
_SPLIT = {
  'wq.weight': 0,
  'wk.weight': 0,
  'wv.weight': 0,
  'w1.weight': 0,
  'w3.weight': 0,
  'output.weight': 0,
  'wo.weight': 1,
  'w2.weight': 1,
}


_WIDTH_OF_3B = 3072
_POSITIONS_OF_SCALED = 131_072  # of Llama 3.1, 3.2 and 3.3, as their config.json says


class MetaTensors:
  """The tensors of consolidated.*.pth, with their shards joined.

  The files are mapped into memory, so that only the tensors in use are read.

  Args:
    folder: The folder that holds the files.
    model_dims: D, the width of the model, which shows how the embedding is split.
  """

  def __init__(self, folder: pathlib.Path, model_dims: int):
    paths = sorted(folder.glob('consolidated.*.pth'))
    if not paths:
      raise UserError(f'{folder} holds no consolidated.*.pth')
    try:
      numbers = [int(p.name.split('.')[1]) for p in paths]
    except ValueError:
      raise UserError(
        f'{folder} holds {paths[-1].name}, and the middle of its name must be a number'
      ) from None
    absent = sorted(set(range(max(numbers) + 1)) - set(numbers))
    if absent:
      raise UserError(f'{folder}/consolidated.{absent[0]:02d}.pth is missing')
    self._shards = [_load(p) for p in paths]
    self._model_dims = model_dims
    self.shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in self._shards[0].items():
      other = [p for p, s in zip(paths, self._shards, strict=True) if name not in s]
      if other:
        raise UserError(f'{other[0]} has no {name}')
      shape = list(tensor.shape)
      axis = self._axis(name)
      if axis is not None:
        shape[axis] *= len(paths)
      self.shapes[name] = tuple(shape)

  def read(self, name: str) -> np.ndarray:
    axis = self._axis(name)
    if axis is None:
      return _numpy(self._shards[0][name])
    return np.concatenate([_numpy(s[name]) for s in self._shards], axis)

  def _axis(self, name: str) -> int | None:
    if name == META['embedding']:  # Llama 3 splits the vocabulary, older ones D
      return 0 if self._shards[0][name].shape[1] == self._model_dims else 1
    return _SPLIT.get('.'.join(name.split('.')[-2:]))


def read_folder(folder: pathlib.Path) -> tuple[LanguageModel, list[Entry], MetaTensors]:
  """Returns a Meta folder's experiment, the entries of the tensors it needs, and its tensors."""
  path = folder / 'params.json'
  params = read_object(path)
  try:
    width, heads = int(params['dim']), int(params['n_heads'])
    layers, epsilon = int(params['n_layers']), float(params['norm_eps'])
    key_heads = int(params.get('n_kv_heads') or heads)
    theta = float(params.get('rope_theta', 10_000.0))
  except KeyError as e:
    raise UserError(f'{path} has no {e.args[0]}') from None
  except (TypeError, ValueError, OverflowError) as e:
    raise UserError(f'{path} has an impossible value ({e})') from None
  tensors = MetaTensors(folder, width)
  for name in (META['embedding'], META['gate'].format(i=0)):
    if name not in tensors.shapes:
      raise UserError(f'{folder}: {name} is missing: these are no weights of LLaMA')
  rows = tensors.shapes.get(META['query'].format(i=0), (width,))[0]
  if rows != width:
    raise UserError(
      f'{folder}: its shards hold {rows:,} of {width:,} rows of the queries: '
      'not all consolidated.*.pth are there'
    )
  values: dict[str, object] = {
    'NUM_LAYERS': layers,
    'NUM_HEADS': heads,
    'NUM_KV_HEADS': key_heads,
    'MODEL_DIMS': width,
    'HIDDEN_DIMS': tensors.shapes[META['gate'].format(i=0)][0],
    'VOCAB_SIZE': tensors.shapes[META['embedding']][0],
    'LAYERNORM_EPSILON': epsilon,
    'ROPE_THETA': theta,
    'SEPARATE_EMBEDDING': META['head'] in tensors.shapes,
  }
  if params.get('use_scaled_rope'):
    # The file does not say it: 32 for the small models (Llama 3.2 1B and 3B), 8 for Llama 3.1, 3.3.
    values['ROPE_FACTOR'] = 32.0 if width <= _WIDTH_OF_3B else 8.0
    values['MAX_POSITION_EMBEDDINGS'] = _POSITIONS_OF_SCALED
  with located(str(path)):
    experiment = published(LLaMA, values)
    check_layers(experiment, tensors.shapes)
  return experiment, decoder_entries(experiment, META, 'interleaved'), tensors


def _load(path: pathlib.Path) -> dict[str, Any]:
  try:
    import torch
  except ImportError:
    raise UserError(f'.pth files need the package torch: {shell.install("meta")}') from None
  try:
    found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
  except Exception as e:  # torch raises a dozen types for this
    raise UserError(f'{path} is damaged, or no file of weights alone: {line_of(e)}') from None
  if not isinstance(found, dict):
    raise UserError(f'{path} holds no tensors by name')
  kinds = (torch.float32, torch.bfloat16, torch.float16)
  for name, tensor in found.items():
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in kinds:
      raise UserError(f'{path}: {name} is {getattr(tensor, "dtype", type(tensor).__name__)}')
  return found


def _numpy(tensor: Any) -> np.ndarray:
  import torch

  if tensor.dtype == torch.bfloat16:
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()
