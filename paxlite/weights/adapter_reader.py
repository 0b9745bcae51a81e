"""Reads a peft adapter and writes it as a LoRA run's checkpoint next to its base."""

import json
import logging
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from flax.linen import meta

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.source import Source
from paxlite.checkpointing.variables import Variable, write_variable
from paxlite.core.errors import UserError, listed, located
from paxlite.core.variable_names import path_name
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.json_files import read_object
from paxlite.generation.inference import experiment_of
from paxlite.weights import adapter_layout
from paxlite.weights.adapter_names import experts_of, module_of, named_weights, short_names
from paxlite.weights.families import hugging_face_entries
from paxlite.weights.folder import write_identity
from paxlite.weights.lora import lengths
from paxlite.weights.model_files import ADAPTER
from paxlite.weights.safetensors_file import FileTensor, tensors_in
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.unfinished_folder import unfinished_folder

log = logging.getLogger('paxlite')

_TENSORS = 'adapter_model.safetensors'
_ROOT = 'base_model.model.'
_ROWS = '.token_adapter.trainable_tokens_delta'
_LEAF = re.compile(r'(.*)\.(lora_A|lora_B|lora_magnitude_vector)(\.weight)?')
# Keys of adapter_config.json that are read, or that change nothing of what the factors compute.
_READ = {
  'peft_type', 'r', 'lora_alpha', 'lora_dropout', 'use_rslora', 'use_dora', 'rank_pattern',
  'alpha_pattern', 'target_modules', 'target_parameters', 'exclude_modules', 'modules_to_save',
  'layers_to_transform', 'layers_pattern', 'base_model_name_or_path', 'task_type', 'revision',
  'inference_mode', 'init_lora_weights', 'auto_mapping', 'peft_version', 'ensure_weight_tying',
  'megatron_core', 'loftq_config', 'eva_config', 'corda_config', 'lora_ga_config',
  'qalora_group_size', 'trainable_token_indices',
}  # fmt: skip
# Ways to begin that leave the weights as they were; pissa, olora, corda and others change them.
_PLAIN_BEGINNINGS = (None, True, False, 'gaussian', 'eva', 'orthogonal')
_OFF: tuple[object, ...] = (None, False, 'none', [], {}, '')


def import_adapter(folder: pathlib.Path, base: Source, to: pathlib.Path) -> tuple[int, str]:
  """Writes a folder with the factors of an adapter; returns its bytes, and a line on them.

  Raises UserError if the adapter has what is not supported, or does not fit the weights.

  Args:
    folder: The adapter, as peft saves it.
    base: The weights that it belongs to, as paxlite import writes them.
    to: The folder to write, which must not exist.
  """
  with located(str(folder)):
    experiment, variables = read_adapter(folder, base)
  sums = {}
  with unfinished_folder(to) as made:
    for name, value in variables.items():
      path = f'params.{name.replace("/", ".")}'
      chunk, sums[chunk] = write_variable(made / 'state', path, np.ascontiguousarray(value))
    (made / 'data').mkdir()
    (made / 'data' / 'metadata').write_text(json.dumps({'frozen': base.fingerprint}))
    write_identity(made, experiment)
    write_checksums(made, sums)
  count = sum(name.endswith('/lora_a') for name in variables)
  return sum(x.nbytes for x in variables.values()), f'{count} pairs of factors'


def read_adapter(folder: pathlib.Path, base: Source) -> tuple[LanguageModel, dict[str, np.ndarray]]:
  """Returns the experiment of an adapter with its base, and the variables that it trains."""
  config = read_object(folder / ADAPTER)
  _check(config)
  if not (folder / _TENSORS).is_file():
    raise UserError(f'{_TENSORS} is missing: save the adapter with safe_serialization=True')
  tensors = {t.name.removeprefix(_ROOT): t for t in tensors_in(str(folder / _TENSORS))}
  plain = experiment_of(base)
  if plain.USE_LORA:
    raise UserError(
      f'--base_weights={base.folder} has factors itself: name weights without factors'
    )
  weights = _Weights(plain)
  factors: dict[str, dict[str, np.ndarray]] = {}
  whole: dict[str, np.ndarray] = {}
  rows: dict[str, np.ndarray] = {}
  for name, tensor in tensors.items():
    value = tensor.read()
    if name.endswith(_ROWS):
      rows |= weights.whole(f'{name.removesuffix(_ROWS)}.weight', value, rows=True)
    elif match := _LEAF.fullmatch(name):
      theirs = weights.parameter(match[1], config, tensors)
      factors.setdefault(theirs, {})[match[2]] = value
    else:
      whole |= weights.whole(name, value)
  _check_head(plain, tensors, whole)
  if not factors:
    raise UserError(f'{_TENSORS} holds no factors of LoRA')
  variables = {n: x for t, of in factors.items() for n, x in weights.factors(t, of).items()}
  ranks = {t: weights.rank(t, of) for t, of in factors.items()}
  rank = Counter(ranks.values()).most_common(1)[0][0]
  alphas = {t: _of_pattern(config, 'alpha_pattern', 'lora_alpha', t) for t in factors}
  alpha = config['lora_alpha']
  names = [w.theirs for w in weights.named]

  def pattern(values: Mapping[str, float], usual: float) -> list[str]:
    found = []
    for value in dict.fromkeys(values.values()):
      if value != usual:
        of = [t for t, v in values.items() if v == value]
        found += [f'{re.escape(n)}={value:g}' for n in short_names(of, names)]
    return found

  saved = {w.theirs for w in weights.named if w.ours in whole}
  values: dict[str, Any] = dict(
    USE_LORA=True, USE_DORA=bool(config.get('use_dora')), LORA_RANK=rank, LORA_ALPHA=float(alpha),
    LORA_RS=bool(config.get('use_rslora')), LORA_DROPOUT=weights.dropout(factors, config),
    LORA_TARGETS=short_names(factors, names), LORA_RANK_PATTERN=pattern(ranks, rank),
    LORA_ALPHA_PATTERN=pattern(alphas, alpha),
    LORA_MODULES_TO_SAVE=short_names(sorted(saved), names, whole=True),
    LORA_TOKENS=(ids := _token_ids(config, rows)), CHECKPOINT_RESTORE_PATH=str(base.folder),
  )  # fmt: skip
  try:
    experiment = _valid(plain, values)
  except UserError:
    if not plain.USE_REPEATED_LAYER:
      raise
    experiment = _valid(plain, values | dict(USE_REPEATED_LAYER=False))
  stored, shapes = base.unrolled_params(), _shapes(experiment)
  for table in (n for n in shapes if n.endswith('/lora_rows')):
    name = f'{table.removesuffix("/lora_rows")}/{"w" if "softmax" in table else "emb_var"}'
    before = stored[name].whole()[ids].astype(np.float32)
    variables[table] = rows.get(name, before).astype(np.float32) - before
  found = _together(variables, shapes)
  if experiment.USE_DORA:
    found |= _grown(found, stored)
  return experiment, {**found, **whole}


def _valid(plain: LanguageModel, values: Mapping[str, Any]) -> LanguageModel:
  experiment = plain.replaced(**values)
  experiment = experiment.replaced(TRAINABLE_VARIABLES=experiment.factor_variables)
  experiment.validate()
  return experiment


def _token_ids(config: Mapping[str, Any], rows: Mapping[str, np.ndarray]) -> list[int]:
  """Returns the ids of the rows that an adapter trains; UserError if two tables have others."""
  stated = config.get('trainable_token_indices') or []
  lists = list(stated.values()) if isinstance(stated, dict) else [stated] * bool(stated)
  if any(ids != lists[0] for ids in lists) or any(len(x) != len(lists[0]) for x in rows.values()):
    raise UserError(
      f'{ADAPTER}: trainable_token_indices={stated!r} are not the same for embedding and head'
    )
  return list(lists[0]) if rows else []


def _check_head(
  e: LanguageModel, tensors: Mapping[str, FileTensor], whole: Mapping[str, np.ndarray]
) -> None:
  """Raises UserError if an adapter has trained a head apart that is the embedding here."""
  embedding, head = whole.get('embedding/emb_var'), tensors.get('lm_head.weight')
  if e.SEPARATE_EMBEDDING or (embedding is None and head is None):
    return
  if embedding is None or head is None or not np.array_equal(head.read(), embedding):
    raise UserError(
      f'{ADAPTER}: modules_to_save trained the embedding apart from the head, but this model ties '
      'them: train the adapter with ensure_weight_tying=True'
    )


def _shapes(e: LanguageModel) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the factors of an unrolled stack."""
  model = fdl.build(e.replaced(USE_REPEATED_LAYER=False).plain.build_task()).model
  made = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  leaves = jax.tree_util.tree_leaves_with_path(meta.unbox(made)['params'])
  return {n: x.shape for path, x in leaves if '/lora_' in (n := path_name(path))}


def _together(
  found: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
  """Returns the variables, parts of combined ones together, and those of lower rank padded."""
  whole: dict[str, np.ndarray] = {}
  for name, value in found.items():
    ours, _, part = name.partition(' ')
    if ours not in shapes:
      raise UserError(
        f'{_TENSORS} has factors of {ours.rpartition("/")[0]}, which are not supported here'
      )
    if part:
      array = whole.setdefault(ours, np.zeros(shapes[ours], value.dtype))
      array[int(part)][tuple(slice(n) for n in value.shape)] = value
    else:
      whole[ours] = value
  if wrong := [n for n, shape in shapes.items() if n not in whole or whole[n].shape != shape]:
    raise UserError(f'{_TENSORS} does not fit the model: {listed(wrong)}')
  return whole


def _grown(
  found: Mapping[str, np.ndarray], weights: Mapping[str, Variable]
) -> dict[str, np.ndarray]:
  """Returns by how much the lengths of DoRA are above those of the weights."""
  grown = {}
  for name in (n for n in found if n.endswith('/lora_m')):
    stem = name.removesuffix('/lora_m')
    w = weights[f'{stem}/w'].whole()
    norms = lengths(w, '/post' in stem, stacked=found[name].ndim > 1).reshape(found[name].shape)
    grown[name] = np.where(found[name] == 0, 0, found[name] - norms).astype(np.float32)
  return grown


def _of_pattern(config: Mapping[str, Any], patterns: str, usual: str, name: str) -> float:
  """Returns peft's value for a module: that of the first expression that its name ends with."""
  found = config.get(patterns) or {}
  return next((v for k, v in found.items() if re.match(rf'(.*\.)?({k})$', name)), config[usual])


def _check(config: Mapping[str, Any]) -> None:
  """Raises UserError for what an adapter has and a run of LoRA has not."""
  if config.get('peft_type') != 'LORA':
    raise UserError(f'{ADAPTER}: peft_type {config.get("peft_type")!r} is not supported, only LORA')
  for key, value in config.items():
    if key not in _READ and value not in _OFF:
      raise UserError(
        f'{ADAPTER}: {key}={value!r} is not supported: merge the adapter with '
        "peft's merge_and_unload, and import the result"
      )
  if (begun := config.get('init_lora_weights')) not in _PLAIN_BEGINNINGS:
    raise UserError(
      f'{ADAPTER}: init_lora_weights={begun!r} has changed the base weights: convert it with '
      "peft's save_pretrained(…, path_initial_model_for_weight_conversion=…), or merge it with "
      "peft's merge_and_unload and import the result"
    )
  numbers = [config.get('r'), config.get('lora_alpha')]
  if not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
    raise UserError(f'{ADAPTER}: r={numbers[0]!r} and lora_alpha={numbers[1]!r} must be above 0')


class _Weights:
  """The weights of a model, by the names that an adapter has for them."""

  def __init__(self, e: LanguageModel):
    self.named = named_weights(e.replaced(USE_LORA=False))
    self._by_name: dict[str, list[Entry]] = {}
    self._tensors: dict[str, list[Entry]] = {}
    self._experts: dict[str, tuple[str, Entry]] = {}
    for entry in hugging_face_entries(e):
      if found := experts_of(e, entry):
        self._experts.setdefault(found[1], (found[0], entry))
      else:
        self._tensors.setdefault(entry.theirs, []).append(entry)
        if entry.ours.endswith('/w') and entry.ours.startswith('transformer/'):
          self._by_name.setdefault(module_of(entry), []).append(entry)
    self._gated = 2 if any(n.endswith('gate_up_proj') for n in self._experts) else 1

  def parameter(self, module: str, config: Mapping[str, Any], names: Mapping[str, object]) -> str:
    """Returns the name of the weight that has the factors of a module of an adapter."""
    module = module.replace('.block_sparse_moe', '.mlp')
    if module in self._by_name:
      return module
    stem, is_inner = module.removesuffix('.base_layer'), module.endswith('.base_layer')
    ups, down = f'{stem}.{"gate_up_proj" if self._gated == 2 else "up_proj"}', f'{stem}.down_proj'
    if down in self._experts:
      is_nested = f'{stem}.base_layer.lora_A.weight' in names
      targets = config.get('target_parameters') or ()
      is_down = not is_inner and (is_nested or any(f'.{down}'.endswith(f'.{t}') for t in targets))
      return down if is_down else ups
    raise UserError(
      f'{_TENSORS}: {module} has factors that are not supported here: leave it out of the '
      "targets, as a router, or name the adapter's base weights with --base_weights"
    )

  def dropout(self, factors: Iterable[str], config: Mapping[str, Any]) -> float:
    """Returns the rate at which training goes on, which is no matter of what is computed."""
    rate = float(config.get('lora_dropout') or 0)
    if not rate or self._experts.keys().isdisjoint(factors):
      return rate
    log.warning(
      '%s: lora_dropout=%g is read as 0: dropout is not supported for factors of experts',
      ADAPTER,
      rate,
    )
    return 0.0

  def rank(self, theirs: str, of: Mapping[str, np.ndarray]) -> int:
    size = len(of['lora_A'])
    return size // self._experts[theirs][1].our_shape[0] if theirs in self._experts else size

  def whole(self, name: str, value: np.ndarray, rows: bool = False) -> dict[str, np.ndarray]:
    """Returns the variable of a tensor that was trained whole, or of some rows of a table."""
    plain = re.sub(r'\.(modules_to_save(\.default)?|original_module)(?=\.)', '', name)
    entries = self._tensors.get(plain)
    if rows and entries is not None and entries[0].ours in ('embedding/emb_var', 'softmax/w'):
      return {entries[0].ours: value}
    if entries is None and plain == 'lm_head.weight':  # of a model whose head is the embedding
      return {}
    if entries is None or len(entries) > 1 or entries[0].shape != value.shape:
      raise UserError(f'{_TENSORS}: {name} {list(value.shape)} is not a weight of the model')
    entry = entries[0]
    return {entry.ours: np.asarray(entry.to_ours(entry.view(value))).reshape(entry.our_shape)}

  def factors(self, theirs: str, of: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns paxlite's variables, combined weights by 'name part'."""
    if missing := {'lora_A', 'lora_B'} - of.keys():
      raise UserError(f'{_TENSORS}: {theirs} has no {min(missing)}')
    a, b = of['lora_A'], of['lora_B']
    entries = self._by_name.get(theirs) or [self._experts[theirs][1]]
    shape = (entries[0].shape[0], a.shape[0])
    if a.ndim != 2 or b.ndim != 2 or (theirs in self._by_name and b.shape != shape):
      raise UserError(
        f'{_TENSORS}: {theirs} has factors {list(a.shape)} and {list(b.shape)}, but the weight is '
        f'{list(entries[0].shape)}: name its base weights with --base_weights'
      )
    if theirs in self._experts:
      module, entry = self._experts[theirs]
      number = self._gated if module.endswith('/in_factors') else 1
      if a.shape[0] % entry.our_shape[0] or b.shape != (entry.our_shape[2] * number, len(a)):
        raise UserError(f'{_TENSORS}: {theirs} has factors of another size than the experts')
      ours = adapter_layout.experts_to_ours(entry, a, b, number)
      return dict(zip((f'{module}/lora_a', f'{module}/lora_b'), ours, strict=True))
    found = {}
    for entry in entries:
      stem = entry.ours.removesuffix('/w')
      part = '' if entry.part is None else f' {entry.part}'
      found[f'{stem}/lora_a{part}'] = a.T
      found[f'{stem}/lora_b{part}'] = adapter_layout.rows_to_ours(entry, b)
      if 'lora_magnitude_vector' in of:
        lengths = of['lora_magnitude_vector'].reshape(-1, 1)
        found[f'{stem}/lora_m{part}'] = adapter_layout.rows_to_ours(entry, lengths)[:, 0]
    return found
