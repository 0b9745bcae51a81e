"""Exports factors of LoRA and DoRA: merged into the weights, or as an adapter of peft."""

import collections
import json
import pathlib
import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import UserError, listed
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.families import family_of, hugging_face_entries
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.huggingface import header
from paxlite.weights.tensor_entries import to_halves, to_pairs
from paxlite.weights.unfinished_folder import unfinished_folder


def merged(variables: Mapping[str, Variable]) -> dict[str, Variable]:
  """Returns weights + A·Bᵀ, with DoRA's lengths, without the variables of both.

  The sum is computed in float32 and has the dtype of the stored weights.
  """
  plain = {k: v for k, v in variables.items() if not re.search(r'/lora_[abm]$', k)}
  for name in variables:
    if name.endswith('/lora_a'):
      stem = name.removesuffix('/lora_a')
      plain[f'{stem}/w'] = _sum(
        variables[f'{stem}/w'],
        variables[name],
        variables[f'{stem}/lora_b'],
        variables.get(f'{stem}/lora_m'),
        '/post' in stem,
      )
  return plain


def write_adapter(
  to: pathlib.Path,
  experiment: LanguageModel,
  variables: Mapping[str, Variable],
  base: str,
  dtype: str,
) -> int:
  """Writes adapter_config.json and adapter_model.safetensors; returns the bytes of the tensors.

  peft computes W + (alpha / r)·B·A. paxlite trains without alpha, which is the same as alpha = r.

  Raises:
    UserError: There are no variables of LoRA, or the factors belong to a part of a tensor.
  """
  ranks = {v.shape[-1] for k, v in variables.items() if k.endswith('/lora_a')}
  if not ranks:
    raise UserError('the checkpoint holds nothing of LoRA: train with USE_LORA=True')
  factors = LORA_VARIABLES, DORA_VARIABLES
  if others := [p for p in experiment.TRAINABLE_VARIABLES if p not in factors]:
    raise UserError(
      f'the run trained {listed(others)} beside the factors, and an adapter would leave them out: '
      'export with --to=hf, which merges all of it'
    )
  entries = hugging_face_entries(experiment)
  family = family_of(experiment)
  if family == 'gpt2':
    raise UserError(
      'a gpt2 of Hugging Face has weights with inputs and outputs in the other order, for which '
      'adapters are not implemented: export with --to=hf, which merges them'
    )
  in_tensor = collections.Counter(entry.theirs for entry in entries)
  swaps = FAMILIES[family].rotary != experiment.ROPE_LAYOUT
  regrouped = to_halves if FAMILIES[family].rotary == 'half' else to_pairs
  (rank,) = ranks
  kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  tensors: dict[str, np.ndarray] = {}
  for entry in entries:
    stem, _, leaf = entry.ours.rpartition('/')
    if leaf != 'w' or f'{stem}/lora_a' not in variables:
      continue
    if in_tensor[entry.theirs] > 1:
      raise UserError(
        f'{entry.theirs} of a {family} holds several weights, for which LoRA here has a pair of '
        'factors each: export with --to=hf, which merges them'
      )
    a, b = variables[f'{stem}/lora_a'].whole(), variables[f'{stem}/lora_b'].whole()
    if entry.part is not None:
      a, b = a[entry.part], b[entry.part]
    is_swapped = swaps and re.search(r'\.[qk]_proj\.', entry.theirs)
    if is_swapped:
      b = regrouped(b.reshape(-1, experiment.DIMS_PER_HEAD, rank), 1).reshape(b.shape)
    name = f'base_model.model.{entry.theirs.removesuffix(".weight")}'
    tensors[f'{name}.lora_A.weight'] = np.ascontiguousarray(a.T).astype(kind)
    tensors[f'{name}.lora_B.weight'] = np.ascontiguousarray(b).astype(kind)
    if f'{stem}/lora_m' in variables:
      w, grown = (variables[f'{stem}/{leaf}'].whole() for leaf in ('w', 'lora_m'))
      if entry.part is not None:
        w, grown = w[entry.part], grown[entry.part]
      lengths = _lengths(w, '/post' in stem).reshape(grown.shape) + grown
      if is_swapped:
        lengths = regrouped(lengths.reshape(-1, experiment.DIMS_PER_HEAD, 1), 1).reshape(-1)
      tensors[f'{name}.lora_magnitude_vector'] = lengths.astype(kind)
  config = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': rank,
    'lora_alpha': rank,
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'use_dora': any(n.endswith('.lora_magnitude_vector') for n in tensors),
    'target_modules': sorted({n.split('.')[-3] for n in tensors if n.endswith('lora_A.weight')}),
  }
  with unfinished_folder(to) as folder:
    (folder / 'adapter_config.json').write_text(json.dumps(config, indent=2) + '\n')
    with (folder / 'adapter_model.safetensors').open('wb') as f:
      f.write(header({n: (t.shape, t.dtype) for n, t in tensors.items()}))
      for tensor in tensors.values():
        f.write(tensor.tobytes())
  return sum(t.nbytes for t in tensors.values())


def _sum(w: Variable, a: Variable, b: Variable, grown: Variable | None, is_post: bool) -> Variable:
  """Returns w + A·Bᵀ, whose lengths are those of w plus `grown`, if that is given."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    factors = a.whole().astype(np.float32), b.whole().astype(np.float32)
    delta = np.einsum('...ir,...or->...io', *factors)
    if is_post:  # w [D, N, H] has the inputs N·H and the outputs D
      delta = delta.T
    plain = w.whole().astype(np.float32)
    whole = plain + delta.reshape(w.shape)
    if grown is not None:
      before, now = (_lengths(x, is_post, stacked=len(a.shape) > 2) for x in (plain, whole))
      whole *= (before + grown.whole().reshape(before.shape)) / np.where(now == 0, 1, now)
    return whole[index].astype(w.dtype)

  return Variable(w.shape, w.dtype, read)


def _lengths(w: np.ndarray, is_post: bool, stacked: bool = False) -> np.ndarray:
  """Returns the norm of the weights of each output; the dimensions of inputs stay as 1."""
  inputs = (1, 2) if is_post else (int(stacked),)
  return np.sqrt(np.square(w.astype(np.float32)).sum(inputs, keepdims=True))
