"""Exports factors of LoRA and DoRA: merged into the weights, or as an adapter of peft."""

import collections
import contextlib
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from paxlite import extensions
from paxlite.checkpointing.source import lineage
from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import AbsentError, UserError, listed
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES, TOKEN_ROWS
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.weights import adapter_layout
from paxlite.weights.adapter_names import experts_of, module_of, short_names
from paxlite.weights.families import family_of, hugging_face_entries
from paxlite.weights.folder import IMPORTED_FROM
from paxlite.weights.huggingface import header
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.unfinished_folder import unfinished_folder

log = logging.getLogger('paxlite')

_OF_LORA = re.compile(rf'{DORA_VARIABLES}|{TOKEN_ROWS}')
_TABLES = {'embedding': 'embedding/emb_var', 'softmax': 'softmax/w'}


def merged(experiment: LanguageModel, variables: Mapping[str, Variable]) -> dict[str, Variable]:
  """Returns weights + scale·A·Bᵀ, with DoRA's lengths, without the variables of both.

  The sum is computed in float32 and has the dtype of the stored weights.
  """
  plain = {k: v for k, v in variables.items() if not _OF_LORA.fullmatch(k)}
  for name in variables:
    if not name.endswith('/lora_a'):
      continue
    stem = name.removesuffix('/lora_a')
    a, b, grown = variables[name], variables[f'{stem}/lora_b'], variables.get(f'{stem}/lora_m')
    ranks, scales = extensions.hook('USE_LORA')(experiment).at(stem)
    if not any(ranks):
      continue  # factors of a run before, which the experiment does not have
    if stem.endswith('_factors'):
      place, _, which = stem.removesuffix('_factors').rpartition('/')
      weights = [n for n in (f'{place}/w_{which}_gate', f'{place}/w_{which}') if n in plain]
      for i, weight in enumerate(weights):
        plain[weight] = _sum_of_experts(variables[weight], a, b, i, scales[0])
      continue
    w = variables[f'{stem}/w']
    plain[f'{stem}/w'] = _sum(w, a, b, grown, '/post' in stem, ranks, scales)
  for place, table in _TABLES.items():
    if rows := variables.get(f'{place}/lora_rows'):
      plain[table] = _with_rows(variables[table], rows, options.value(experiment, 'LORA_TOKENS'))
  return plain


def _with_rows(table: Variable, rows: Variable, ids: Sequence[int]) -> Variable:
  def read(index: tuple[slice, ...]) -> np.ndarray:
    whole = table.whole().astype(np.float32)
    whole[[*ids]] += rows.whole()
    return whole[index].astype(table.dtype)

  return Variable(table.shape, table.dtype, read)


class _Adapter:
  """The tensors of an adapter, and the factors that they are of, by the names of modules."""

  def __init__(self, dtype: str):
    self.tensors: dict[str, np.ndarray] = {}
    self.linear: dict[str, Any] = {}
    self.experts: dict[str, Any] = {}
    self.whole: list[str] = []
    self.rows: list[str] = []
    self._kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)

  def put(self, name: str, value: np.ndarray) -> None:
    self.tensors[f'base_model.model.{name}'] = np.ascontiguousarray(value).astype(self._kind)

  def put_factors(self, module: str, a: np.ndarray, b: np.ndarray) -> None:
    """Puts A [in, rank] and B [out, rank]."""
    self.put(f'{module}.lora_A.weight', a.T)
    self.put(f'{module}.lora_B.weight', b)

  def config(self, e: LanguageModel, base: str, names: list[str]) -> dict[str, object]:
    """Returns the contents of adapter_config.json; `names` are those of all modules."""
    root = lambda f: math.sqrt(f.rank) if options.value(e, 'LORA_RS') else f.rank
    number = lambda x: int(x) if x == int(x) else x
    kinds = {n: (f.rank, number(round(f.scale * root(f), 9))) for n, f in self._all.items()}
    name, revision = on_hub(base)
    rank, alpha = collections.Counter(kinds.values()).most_common(1)[0][0]

    def pattern(i: int, usual: float) -> dict[str, float]:
      groups: dict[float, list[str]] = {}
      for name, kind in kinds.items():
        groups.setdefault(kind[i], []).append(name)
      groups.pop(usual, None)
      return {s: v for v, of in groups.items() for s in short_names(of, [*names, *self._all])}

    return {
      'peft_type': 'LORA',
      'task_type': 'CAUSAL_LM',
      'base_model_name_or_path': name,
      'revision': revision,
      'r': rank,
      'lora_alpha': alpha,
      'lora_dropout': options.value(e, 'LORA_DROPOUT'),
      'bias': 'none',
      'fan_in_fan_out': False,
      'inference_mode': True,
      'use_dora': any(n.endswith('.lora_magnitude_vector') for n in self.tensors),
      'use_rslora': options.value(e, 'LORA_RS'),
      'target_modules': sorted(short_names(self.linear, names)),
      'target_parameters': sorted(short_names(self.experts, names, whole=True)) or None,
      'rank_pattern': pattern(0, rank),
      'alpha_pattern': pattern(1, alpha),
      'modules_to_save': sorted(short_names(self.whole, names, whole=True)) or None,
      'trainable_token_indices': {
        name.rpartition('.')[2]: list(options.value(e, 'LORA_TOKENS')) for name in self.rows
      }
      or None,
      'ensure_weight_tying': bool(self.whole) and not e.SEPARATE_EMBEDDING,
    }

  @property
  def _all(self) -> dict[str, Any]:
    return self.linear | self.experts


def on_hub(base: str) -> tuple[str, str | None]:
  """Returns a model's name and its revision, from org/name@revision; of a path, None."""
  named = re.fullmatch(r'([\w.-]+/[\w.-]+)@(.+)', base)
  return (named[1], named[2]) if named and not os.path.exists(base) else (base, None)


def named_base(checkpoint: str, base: str) -> str:
  """Returns what the base weights of a LoRA checkpoint were imported from.

  It is '' if nothing says it, or if a run has trained the imported weights: an adapter of its
  weights does not fit those that it began with.

  Args:
    checkpoint: The run, or the weights.
    base: The base weights, if they were moved.
  """
  with contextlib.suppress(AbsentError):
    for source in lineage(base or checkpoint):
      if source.experiment.is_file() and not source.written_by['values'].get('USE_LORA'):
        return str(read_object(source.experiment).get(IMPORTED_FROM) or '')
  return ''


def write_adapter(
  to: pathlib.Path,
  experiment: LanguageModel,
  variables: Mapping[str, Variable],
  base: str,
  dtype: str,
) -> int:
  """Writes adapter_config.json and adapter_model.safetensors; returns the bytes of the tensors.

  Raises UserError if there are no variables of LoRA, or the run trained what an adapter leaves out.
  """
  e = experiment
  if not any(name.endswith('/lora_a') for name in variables):
    raise UserError('the checkpoint has no LoRA factors: train with USE_LORA=True')
  every = [LORA_VARIABLES, DORA_VARIABLES, *e.factor_variables]
  if others := [p for p in e.TRAINABLE_VARIABLES if p not in every]:
    raise UserError(
      f'the run also trained {listed(others)}, which an adapter would leave out: export with '
      '--to=hf, which merges everything, or train these weights with LORA_MODULES_TO_SAVE'
    )
  if family_of(e) == 'gpt2':
    raise UserError(
      "Hugging Face's gpt2 stores weights transposed, for which adapters are not supported: "
      'export with --to=hf, which merges them'
    )
  adapter, factors = _Adapter(dtype), extensions.hook('USE_LORA')(e)
  tokens = options.value(e, 'LORA_TOKENS')
  by_tensor: dict[str, list[Entry]] = {}
  experts: dict[str, tuple[str, Entry]] = {}
  for entry in hugging_face_entries(e):
    if found := experts_of(e, entry):
      if f'{found[0]}/lora_a' in variables:
        experts.setdefault(found[1], (found[0], entry))
    else:
      by_tensor.setdefault(entry.theirs, []).append(entry)
  for theirs, group in by_tensor.items():
    if any(re.fullmatch(p, group[0].ours) for p in factors.whole_variables):
      value = variables[group[0].ours].whole()
      adapter.put(theirs, np.asarray(group[0].to_theirs(value)).reshape(group[0].shape))
      adapter.whole.append(module_of(group[0]))
      if group[0].ours == _TABLES['embedding'] and not e.SEPARATE_EMBEDDING:
        adapter.put('lm_head.weight', value)  # peft has one tensor for each name
    elif group[0].ours in _TABLES.values() and tokens:
      table, module = group[0].ours, module_of(group[0])
      rows = variables[f'{table.partition("/")[0]}/lora_rows'].whole()
      whole = variables[table].whole()[[*tokens]].astype(np.float32) + rows
      adapter.put(f'{module}.token_adapter.trainable_tokens_delta', whole)
      adapter.rows.append(module)
    elif group[0].ours.endswith('/w'):
      _put_linear(adapter, factors, group, variables)
  for theirs, size in factors.of(experts).items():
    module, entry = experts[theirs]
    a, b = (variables[f'{module}/{leaf}'].whole() for leaf in ('lora_a', 'lora_b'))
    place = theirs.rpartition('.')[0]
    is_inner = module.endswith('/in_factors') and f'{place}.down_proj' in experts
    adapter.put_factors(
      place + ('.base_layer' if is_inner else ''), *adapter_layout.experts_to_theirs(entry, a, b)
    )
    adapter.experts[theirs] = size
  if shared := [n for n in adapter.linear if re.search(r'\.shared_experts?\.', n)]:
    log.warning('%s: peft 0.21 treats shared experts as experts and may not load it', shared[0])
  names = [module_of(entry) for group in by_tensor.values() for entry in group]
  config = adapter.config(e, base, [*names, *(n for n in experts)])
  tensors = adapter.tensors
  with unfinished_folder(to) as folder:
    (folder / 'adapter_config.json').write_text(json.dumps(config, indent=2) + '\n')
    with (folder / 'adapter_model.safetensors').open('wb') as f:
      f.write(header({n: (t.shape, t.dtype) for n, t in tensors.items()}))
      for tensor in tensors.values():
        f.write(tensor.tobytes())
  return sum(t.nbytes for t in tensors.values())


def _put_linear(
  adapter: _Adapter, factors: Any, group: list[Entry], variables: Mapping[str, Variable]
) -> None:
  """Puts the factors of one tensor, which may hold several weights of ours.

  Several pairs of factors become one of all their columns, unless they have one A.
  """
  module, parts, norms_of = module_of(group[0]), [], []
  for entry in group:
    stem = entry.ours.removesuffix('/w')
    if f'{stem}/lora_a' not in variables:
      continue
    a, b = (_part(variables[f'{stem}/{leaf}'], entry) for leaf in ('lora_a', 'lora_b'))
    rank = factors.of([module])[module].rank
    parts.append((a[:, :rank], adapter_layout.rows_to_theirs(entry, b[:, :rank])))
    if f'{stem}/lora_m' in variables:
      w, grown = (_part(variables[f'{stem}/{leaf}'], entry) for leaf in ('w', 'lora_m'))
      norms = lengths(w, '/post' in stem).reshape(grown.shape) + grown
      norms_of.append(adapter_layout.rows_to_theirs(entry, norms[:, None])[:, 0])
  if not parts or not parts[0][0].shape[1]:
    return
  every_a, every_b = zip(*parts, strict=True)
  if all(np.array_equal(a, every_a[0]) for a in every_a):
    a, b = every_a[0], np.sum(every_b, 0)
  else:
    a, b = np.concatenate(every_a, 1), np.concatenate(every_b, 1)
  adapter.put_factors(module, a, b)
  adapter.linear[module] = factors.of([module])[module]._replace(rank=a.shape[1])
  if norms_of:
    adapter.put(f'{module}.lora_magnitude_vector', np.sum(norms_of, 0))


def _part(variable: Variable, entry: Entry) -> np.ndarray:
  """Returns a variable, or the part of a combined one that a tensor is, in float32."""
  value = variable.whole().astype(np.float32)
  return value if entry.part is None else value[entry.part]


def _sum_of_experts(w: Variable, a: Variable, b: Variable, i: int, scale: float) -> Variable:
  """Returns w + scale·A·B of weight i [E, in, out] of those that have one A."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    factors = a.whole().astype(np.float32), b.whole()[i].astype(np.float32)
    whole = w.whole().astype(np.float32) + scale * np.einsum('eir,ero->eio', *factors)
    return whole[index].astype(w.dtype)

  return Variable(w.shape, w.dtype, read)


def _sum(
  w: Variable,
  a: Variable,
  b: Variable,
  grown: Variable | None,
  is_post: bool,
  ranks: tuple[int, ...],
  scales: tuple[float, ...],
) -> Variable:
  """Returns w + scale·A·Bᵀ, whose lengths are those of w plus `grown`, if that is given."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    factors = [a.whole().astype(np.float32), b.whole().astype(np.float32)]
    if len(a.shape) > 2:  # a combined weight, whose parts have ranks of their own
      factors[0] = factors[0] * (np.arange(a.shape[-1]) < np.array(ranks)[:, None])[:, None]
      factors[1] = factors[1] * np.array(scales, np.float32)[:, None, None]
    elif scales[0] != 1:
      factors[1] = factors[1] * np.float32(scales[0])
    delta = np.einsum('...ir,...or->...io', *factors)
    if is_post:  # w [D, N, H] has the inputs N·H and the outputs D
      delta = delta.T
    plain = w.whole().astype(np.float32)
    whole = plain + delta.reshape(w.shape)
    if grown is not None:
      before, now = (lengths(x, is_post, stacked=len(a.shape) > 2) for x in (plain, whole))
      more = grown.whole().reshape(before.shape)
      if len(a.shape) > 2:  # parts without factors keep their lengths
        more = more * (np.array(ranks) > 0).reshape(-1, 1, 1, 1)
      whole *= (before + more) / np.where(now == 0, 1, now)
    return whole[index].astype(w.dtype)

  return Variable(w.shape, w.dtype, read)


def lengths(w: np.ndarray, is_post: bool, stacked: bool = False) -> np.ndarray:
  """Returns the norm of the weights of each output; the dimensions of inputs stay as 1."""
  inputs = (1, 2) if is_post else (int(stacked),)
  return np.sqrt(np.square(w.astype(np.float32)).sum(inputs, keepdims=True))
