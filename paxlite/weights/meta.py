"""Meta's LLaMA checkpoints: params.json, and consolidated.*.pth, one file for each shard."""

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of, located
from paxlite.core.fields import Fields
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.files.json_files import read_object
from paxlite.files.text_files import check_file
from paxlite.weights.families import published
from paxlite.weights.known_keys import check_count, check_known, shortened
from paxlite.weights.layout import check_layers, decoder_entries
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.tensor_names import META

IGNORED = r'rope\.freqs|layers\.\d+\.attention\.inner_attention\.rope\.freqs'

# The dimension that is split over the shards, by the last two parts of a tensor's name. Norms are
# not split: every shard holds all of them.
_SPLIT = {
  'wq.weight': 0, 'wk.weight': 0, 'wv.weight': 0, 'w1.weight': 0, 'w3.weight': 0,
  'output.weight': 0, 'wo.weight': 1, 'w2.weight': 1,
}  # fmt: skip


_WIDTH_OF_3B = 3072
_POSITIONS_OF_SCALED = 131_072  # of Llama 3.1, 3.2 and 3.3, as their config.json says

# The keys of params.json that are read, with what they become.
READ: Mapping[str, str] = {
  'dim': 'MODEL_DIMS', 'n_layers': 'NUM_LAYERS', 'n_heads': 'NUM_HEADS',
  'n_kv_heads': 'NUM_KV_HEADS',
  'norm_eps': 'LAYERNORM_EPSILON', 'rope_theta': 'ROPE_THETA', 'use_scaled_rope': 'ROPE_FACTOR',
  'vocab_size': 'compared with the embedding', 'head_dim': 'must be dim / n_heads',
  'hidden_dim': 'compared with the tensors',
}  # fmt: skip
# They say how wide the feed-forward layers are, which the tensors say, too; or how text is made.
HARMLESS = (
  'multiple_of', 'ffn_dim_multiplier', 'max_seq_len', 'max_batch_size', 'model_parallel_size',
)  # fmt: skip
_MOST_LAYERS, _MOST = 2000, 1 << 31
_MATRIX = 2  # dimensions


class MetaTensors:
  """The tensors of consolidated.*.pth, with their shards joined.

  The files are mapped into memory, so that only the tensors in use are read.

  Args:
    folder: The folder that holds the files.
    model_dims: D, the width of the model, which shows how the embedding is split.
  """

  def __init__(self, folder: pathlib.Path, model_dims: int):
    paths = sorted(folder.glob('consolidated.*.pth'), key=lambda p: (len(p.name), p.name))
    if not paths:
      raise UserError(f'{folder} holds no consolidated.*.pth')
    try:
      numbers = [int(p.name.split('.')[1]) for p in paths]
    except ValueError:
      raise UserError(
        f'{folder} holds {paths[-1].name}, and the middle of its name must be a number'
      ) from None
    absent = [i for i in range(len(numbers)) if i not in numbers]
    if absent:
      raise UserError(
        f'{folder}/consolidated.{absent[0]:02d}.pth is missing: there is {paths[-1].name}'
      )
    self._shards = [_load(p) for p in paths]
    self._model_dims = model_dims
    self.shapes: dict[str, tuple[int, ...]] = {}
    for path, shard in zip(paths, self._shards, strict=True):
      if more := sorted(shard.keys() - self._shards[0].keys()):
        raise UserError(f'{path} has {more[0]}, and {paths[0]} does not')
    for name, tensor in self._shards[0].items():
      other = [p for p, s in zip(paths, self._shards, strict=True) if name not in s]
      if other:
        raise UserError(f'{other[0]} has no {name}')
      shape = list(tensor.shape)
      axis = self._axis(name)
      if axis is not None:
        if len(shape) <= axis:
          raise UserError(f'{paths[0]}: {name} is {shape}, which is not a matrix')
        shape[axis] = sum(
          shard[name].shape[axis] for shard in self._shards if shard[name].ndim > axis
        )
      kinds = {
        (s[name].dtype, *(n for i, n in enumerate(s[name].shape) if i != axis))
        for s in self._shards
      }
      if len(kinds) > 1:
        raise UserError(f'{paths[-1]}: {name} does not fit to those of the files before it')
      if axis is None and not all(tensor.equal(s[name]) for s in self._shards[1:]):
        raise UserError(f'{name} is not split, and differs between consolidated.*.pth')
      self.shapes[name] = tuple(shape)

  def read(self, name: str) -> np.ndarray:
    axis = self._axis(name)
    if axis is None:
      return _numpy(self._shards[0][name])
    return np.concatenate([_numpy(s[name]) for s in self._shards], axis)

  def _axis(self, name: str) -> int | None:
    if name == META['embedding']:  # Llama 3 splits the vocabulary, older ones D
      return 0 if self._shards[0][name].shape[1:] == (self._model_dims,) else 1
    return _SPLIT.get('.'.join(name.split('.')[-2:]))


def read_folder(folder: pathlib.Path) -> tuple[LanguageModel, list[Entry], MetaTensors]:
  """Returns a Meta folder's experiment, the entries of the tensors it needs, and its tensors."""
  path = folder / 'params.json'
  fields = Fields(read_object(path))
  params = {name: fields.get(name) for name in READ if name in fields}
  try:
    with located(str(path)):
      check_known(fields.left(), HARMLESS, {})
      layers = check_count('n_layers', params['n_layers'], _MOST_LAYERS)
      width, heads = (check_count(name, params[name], _MOST) for name in ('dim', 'n_heads'))
      stated = params.get('n_kv_heads')
      if params.get('head_dim') not in (None, width // max(heads, 1)):
        raise UserError(f'head_dim={shortened(params["head_dim"])} is not dim / n_heads')
      key_heads = heads if stated is None else check_count('n_kv_heads', stated, _MOST)
    epsilon, theta = float(params['norm_eps']), float(params.get('rope_theta', 10_000.0))
  except KeyError as e:
    raise UserError(f'{path} has no {e.args[0]}') from None
  except (TypeError, ValueError, OverflowError) as e:
    if isinstance(e, UserError):
      raise
    raise UserError(f'{path} has an impossible value ({e})') from None
  tensors = MetaTensors(folder, width)
  for name in (META['embedding'], META['gate'].format(i=0)):
    if len(tensors.shapes.get(name, ())) != _MATRIX:
      raise UserError(f'{folder}: {name} is missing or not a matrix: these are not LLaMA weights')
  rows = tensors.shapes.get(META['query'].format(i=0), (width,))[0]
  if rows != width:
    raise UserError(
      f'{folder}: its shards hold {rows:,} of {width:,} rows of the queries: some '
      'consolidated.*.pth are missing'
    )
  vocabulary = tensors.shapes[META['embedding']][0]
  hidden = tensors.shapes[META['gate'].format(i=0)][0]
  for name, found in (('vocab_size', vocabulary), ('hidden_dim', hidden)):
    if params.get(name) not in (None, -1, found):
      raise UserError(f'{path}: {name}={shortened(params[name])}, and the tensors have {found:,}')
  values: dict[str, object] = {
    'NUM_LAYERS': layers, 'NUM_HEADS': heads, 'NUM_KV_HEADS': key_heads, 'MODEL_DIMS': width,
    'HIDDEN_DIMS': hidden, 'VOCAB_SIZE': vocabulary, 'LAYERNORM_EPSILON': epsilon,
    'ROPE_THETA': theta, 'SEPARATE_EMBEDDING': META['head'] in tensors.shapes,
  }  # fmt: skip
  if params.get('use_scaled_rope'):
    # The file does not say it: 32 for the small models (Llama 3.2 1B and 3B), 8 for Llama 3.1, 3.3.
    values['ROPE_FACTOR'] = 32.0 if width <= _WIDTH_OF_3B else 8.0
    values['MAX_POSITION_EMBEDDINGS'] = _POSITIONS_OF_SCALED
  with located(str(path)):
    experiment = published(LLaMA, values)
    check_layers(experiment, tensors.shapes, META)
  return experiment, decoder_entries(experiment, META, 'interleaved'), tensors


def _load(path: pathlib.Path) -> dict[str, Any]:
  try:
    import torch
  except ImportError:
    raise UserError(f'.pth files need the package torch: {shell.install("meta")}') from None
  check_file(path)
  try:
    found = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
  except Exception as e:  # torch raises a dozen types for this
    raise UserError(f'{path} is damaged, or does not hold weights alone: {line_of(e)}') from None
  if not isinstance(found, dict):
    raise UserError(f'{path} holds no tensors by name')
  kinds = (torch.float32, torch.bfloat16, torch.float16)
  for name, tensor in found.items():
    if not isinstance(name, str):
      raise UserError(f'{path} holds no tensors by name: {shortened(name)} is not a name')
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in kinds:
      raise UserError(f'{path}: {name} is {getattr(tensor, "dtype", type(tensor).__name__)}')
    if tensor.layout != torch.strided or tensor.device.type != 'cpu':
      raise UserError(f'{path}: {name} holds no values (its layout is {tensor.layout})')
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
      raise UserError(f'{path}: {name} {list(tensor.shape)} has more elements than are stored')
  return found


def _numpy(tensor: Any) -> np.ndarray:
  import torch

  tensor = tensor.detach().resolve_conj().resolve_neg()
  if tensor.dtype == torch.bfloat16:
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()
