"""The fields of a GGUF file, and the experiment that they describe.

Those of the architecture llama become attributes, those of others a config.json (gguf_families).
Every field is read, known to be harmless, or refused, as every key of a config.json.
"""

import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError, located
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.weights.families import end_ids, experiment_of, published
from paxlite.weights.generation_keys import read_generation
from paxlite.weights.gguf_families import (
  ARCHITECTURES,
  PATTERN,
  ROPE_FREQS,
  Architecture,
  config_of,
  rope_freqs,
)
from paxlite.weights.gguf_file import SPLIT, GgufTensors, file_of
from paxlite.weights.known_keys import check_count, check_known, shortened
from paxlite.weights.layout import check_layers
from paxlite.weights.rope_keys import KEYS
from paxlite.weights.tensor_entries import Entry
from paxlite.weights.tensor_names import GGUF

# The fields that are read, with what they become. Those of the architecture have no first word.
READ: Mapping[str, str] = {
  'general.architecture': 'llama', 'general.type': 'model', 'general.alignment': 'read',
  'split.no': 'all parts are read', 'split.count': 'all parts are read',
  'split.tensors.count': 'compared with the parts',
  '.block_count': 'NUM_LAYERS', '.context_length': 'MAX_SEQ_LEN', '.embedding_length': 'MODEL_DIMS',
  '.feed_forward_length': 'HIDDEN_DIMS', '.attention.head_count': 'NUM_HEADS',
  '.attention.head_count_kv': 'NUM_KV_HEADS', '.attention.key_length': 'DIMS_PER_HEAD',
  '.attention.value_length': 'DIMS_PER_HEAD', '.rope.dimension_count': 'DIMS_PER_HEAD',
  '.attention.layer_norm_rms_epsilon': 'LAYERNORM_EPSILON', '.vocab_size': 'VOCAB_SIZE',
  '.attention.scale': 'the root of 1 / DIMS_PER_HEAD, or 0',
  '.attention.sliding_window': '0, or at least MAX_SEQ_LEN',
  '.rope.freq_base': 'ROPE_THETA', '.rope.scaling.type': 'ROPE_SCALING: none, linear, yarn',
  '.rope.scaling.factor': 'ROPE_FACTOR', '.rope.scale_linear': 'ROPE_FACTOR',
  '.rope.scaling.original_context_length': 'ROPE_ORIGINAL_LENGTH',
  '.rope.scaling.yarn_beta_fast': 'ROPE_FAST_TURNS',
  '.rope.scaling.yarn_beta_slow': 'ROPE_SLOW_TURNS',
  'tokenizer.ggml.eos_token_id': 'EOS_IDS', 'tokenizer.ggml.eot_token_id': 'EOS_IDS',
  'tokenizer.ggml.eom_token_id': 'EOS_IDS',
}  # fmt: skip

# Fields that change nothing.
HARMLESS: Sequence[str] = (
  r'general\.(name|author|version|organization|finetune|basename|description|quantized_by)',
  r'general\.(size_label|license(\.name|\.link)?|url|doi|uuid|repo_url|tags|languages|datasets)',
  r'general\.(file_type|parameter_count|base_model\.count|dataset\.count)',
  r'general\.source\.(url|doi|uuid|repo_url|huggingface\.repository|hf_repo)',
  r'general\.(base_model|dataset)\.\d+\.(name|author|version|organization|description|url)',
  r'general\.(base_model|dataset)\.\d+\.(doi|uuid|repo_url)',
  r'general\.sampling\.\w+',  # read_generation reads them
  r'quantize\.imatrix\.\w+', r'imatrix\.\w+', r'mradermacher\.\w+',
  r'\.rope\.scaling\.finetuned',
  r'tokenizer\..*',  # gguf_tokenizer reads them, where the tokenizer is converted
)  # fmt: skip

# Fields that change a model, with the values that change nothing.
NEUTRAL: Mapping[str, Sequence[object]] = {
  'general.quantization_version': (2,),
  '.tensor_data_layout': ('Meta AI original pth',),
  '.use_parallel_residual': (False,), '.pooling_type': (0,), '.swin_norm': (False,),
  '.attention.causal': (True,), '.attention.clamp_kqv': (0.0,),
  '.attention.max_alibi_bias': (0.0,), '.attn_logit_softcapping': (0.0,),
  '.final_logit_softcapping': (0.0,), '.router_logit_softcapping': (0.0,),
  '.logit_scale': (0.0, 1.0), '.embedding_scale': (0.0, 1.0), '.residual_scale': (0.0, 1.0),
  '.expert_count': (0,), '.expert_used_count': (0,), '.expert_shared_count': (0,),
  '.expert_group_count': (0,), '.expert_group_used_count': (0,), '.leading_dense_block_count': (0,),
  '.expert_feed_forward_length': (0,), '.expert_shared_feed_forward_length': (0,),
  '.expert_weights_scale': (0.0, 1.0), '.nextn_predict_layers': (0,),
  '.rope.scaling.attn_factor': (1.0,), '.rope.scaling.yarn_attn_factor': (1.0,),
  '.rope.scaling.yarn_ext_factor': (1.0,), '.rope.scaling.yarn_log_multiplier': (0.0,),
}  # fmt: skip

IGNORED = ROPE_FREQS.replace('.', r'\.')  # a tensor that is read without an entry
_SAMPLING = 'general.sampling.'
_SAMPLED = {'temp': 'temperature', 'penalty_repeat': 'repetition_penalty'}
_ENDS = ('eos', 'eot', 'eom')
_STRETCHING = ('.rope.scaling.', '.rope.scale_linear')
_MOST_LAYERS = 2000


def read_file(path: pathlib.Path) -> tuple[LanguageModel, list[Entry], GgufTensors]:
  """Returns a GGUF file's experiment, the entries of the tensors it needs, and its tensors.

  Args:
    path: The file, one of its parts, or a folder with one model.

  Raises:
    UserError: The file is damaged, or says something that is not implemented.
  """
  path = file_of(path)
  tensors = GgufTensors(path)
  with located(str(path)):
    architecture = _architecture(tensors.fields)
    _check_fields(tensors.fields, architecture)
    vocabulary = tensors.shapes.get(GGUF['embedding'])
    if not vocabulary:
      raise UserError(f'it has no {GGUF["embedding"]}')
    named = (tensors.fields.get(f'tokenizer.ggml.{name}_token_id') for name in _ENDS)
    ends = end_ids([i for i in named if i is not None], vocabulary[0])
    is_llama = architecture.kind == 'llama'
    found = _llama(tensors) if is_llama else _config(architecture, tensors)
  # its errors name the path
  experiment = found if isinstance(found, LanguageModel) else experiment_of(found, path)
  with located(str(path)):
    check_layers(experiment, tensors.shapes, architecture.names)
    entries = architecture.entries(experiment)
  tensors.offset = architecture.offset
  experiment = read_generation(_generation(tensors.fields), experiment, path)
  return experiment.replaced(EOS_IDS=ends), entries, tensors


def _generation(fields: Mapping[str, Json]) -> JsonObject:
  """Returns how the publisher of a file generates text, as generation_config.json names it."""
  found = {k.removeprefix(_SAMPLING): v for k, v in fields.items() if k.startswith(_SAMPLING)}
  named = {_SAMPLED.get(name, name): value for name, value in found.items()}
  return named | ({'do_sample': bool(named['temperature'])} if 'temperature' in named else {})


def _architecture(fields: Mapping[str, object]) -> Architecture:
  """Returns the architecture of a file; raises UserError if it is none that is implemented."""
  kind = fields.get('general.type', 'model')
  if kind != 'model':
    hint = ': merge it into its model, with llama-export-lora' if kind == 'adapter' else ''
    raise UserError(f'it holds no model (general.type={shortened(kind)}){hint}')
  name = fields.get('general.architecture')
  found = {a.name: a for a in reversed(ARCHITECTURES)}  # the first of each name
  if not isinstance(name, str) or name not in found:
    known = ', '.join(reversed(found))
    raise UserError(f'architecture {shortened(name)} is not implemented; {known} are')
  experts = [fields.get(f'{name}.{count}') for count in ('expert_count', 'expert_used_count')]
  if name == 'llama' and all(experts):
    return next(a for a in ARCHITECTURES if a.kind == 'mixtral')
  return found[name]


def _config(architecture: Architecture, tensors: GgufTensors) -> JsonObject:
  """Returns the config.json that a file of another architecture than llama stands for."""
  name = architecture.name
  check_count(f'{name}.block_count', tensors.number(f'{name}.block_count'), _MOST_LAYERS)
  length = tensors.number(f'{name}.context_length')
  window = tensors.number(f'{name}.attention.sliding_window', 0)
  if 'attention.sliding_window' not in architecture.fields and 0 < window < length:
    raise UserError(
      f'{name}.attention.sliding_window={window:g} is not implemented, and llama.cpp ignores it: '
      'import the Hugging Face folder'
    )
  if ROPE_FREQS in tensors.shapes:
    raise UserError(f'it stretches rotary positions ({ROPE_FREQS}): import the Hugging Face folder')
  number = lambda field, default=None: tensors.number(f'{name}.{field}', default)
  stretching = _stretching(tensors.fields, name, number)
  given = {f: number(f) for f in architecture.fields if f'{name}.{f}' in tensors.fields}
  pattern = tensors.fields.get(f'{name}.{PATTERN}')
  if isinstance(pattern, list) and not all(isinstance(on, bool) for on in pattern):
    raise UserError(f'{name}.{PATTERN}={shortened(pattern)} must have a truth value for each block')
  if pattern is not None and not isinstance(pattern, list):
    pattern = check_count(f'{name}.{PATTERN}', pattern, _MOST_LAYERS)
  return config_of(architecture, given, pattern, tensors.shapes, stretching)


def _llama(tensors: GgufTensors) -> LanguageModel:
  fields, architecture = tensors.fields, 'llama'
  embedding = tensors.shapes[GGUF['embedding']]

  def number(name: str, default: float | None = None) -> float:
    return tensors.number(f'{architecture}.{name}', default)

  heads, width = number('attention.head_count'), number('embedding_length')
  head_dim = number('attention.key_length', width // heads if heads else 0)
  length = number('context_length')
  layers = check_count(f'{architecture}.block_count', number('block_count'), _MOST_LAYERS)

  def same(name: str, expected: float, what: str) -> None:
    if number(name, expected) != expected:
      raise UserError(
        f'{architecture}.{name}={number(name):g} is not implemented: {what} is {expected:g}'
      )

  # llama.cpp refuses these of this architecture, too
  same('attention.value_length', head_dim, 'the width of keys')
  same('rope.dimension_count', head_dim, 'the width of a head')
  same('vocab_size', embedding[0], f'the number of rows of {GGUF["embedding"]}')
  if 0 < number('attention.sliding_window', 0) < length:
    raise UserError(
      f'{architecture}.attention.sliding_window={number("attention.sliding_window"):g} is not '
      'implemented, and llama.cpp ignores it: import the Hugging Face folder'
    )
  scale = number('attention.scale', 0)
  if scale and not math.isclose(scale, 1 / math.sqrt(max(head_dim, 1)), rel_tol=1e-5):
    raise UserError(f'{architecture}.attention.scale={scale:g} is not implemented')
  values: dict[str, object] = {
    'NUM_LAYERS': layers,
    'NUM_HEADS': heads,
    'NUM_KV_HEADS': number('attention.head_count_kv', heads),
    'MODEL_DIMS': width,
    'HIDDEN_DIMS': number('feed_forward_length'),
    'DIMS_PER_HEAD': head_dim,
    'HEADS_SPAN_MODEL': heads * head_dim == width,
    'VOCAB_SIZE': embedding[0],
    'MAX_SEQ_LEN': length,
    'MAX_POSITION_EMBEDDINGS': length,
    'LAYERNORM_EPSILON': round(number('attention.layer_norm_rms_epsilon'), 12),
    'ROPE_THETA': number('rope.freq_base', 10_000.0),
    'SEPARATE_EMBEDDING': GGUF['head'] in tensors.shapes,
    'FPROP_DTYPE': 'float32',
  }
  if ROPE_FREQS in tensors.shapes:
    values |= _llama3(tensors, head_dim, number)
  else:
    values |= _stretching(fields, architecture, number)
  return published(LLaMA, values)


def _llama3(tensors: GgufTensors, head_dim: float, number: Callable[..., float]) -> JsonObject:
  """Returns the attributes of Llama 3's rotary positions, of which a file holds the result alone.

  Raises:
    UserError: They are not those that Llama 3 has with some factor.
  """
  stored = tensors.read(ROPE_FREQS)
  rope: JsonObject = {
    'rope_type': 'llama3',
    'factor': float(np.round(stored.max(), 4)),
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': number('rope.scaling.original_context_length', 8192),
  }
  theta = number('rope.freq_base', 10_000.0)
  expected = rope_freqs({'rope_scaling': rope, 'head_dim': head_dim, 'rope_theta': theta})
  if expected is None or stored.shape != expected.shape or not np.allclose(stored, expected, 1e-4):
    raise UserError(
      f'it stretches rotary positions ({ROPE_FREQS}) in another way than Llama 3: import the '
      'Hugging Face folder'
    )
  return {'ROPE_SCALING': 'llama3'} | {k: rope[name] for name, k in KEYS['llama3'].items()}


def read_fields(architecture: Architecture) -> set[str]:
  """Returns the fields that are read; those of the architecture have no first word."""
  if architecture.kind == 'llama':
    return set(READ)
  everywhere = {name for name in READ if name[0] != '.' or name.startswith(_STRETCHING)}
  return everywhere | {f'.{name}' for name in architecture.read}


def _check_fields(fields: Mapping[str, object], architecture: Architecture) -> None:
  """Raises UserError for fields that may change what the model computes, and are not read."""
  unread: dict[str, object] = {}
  neutral: dict[str, Sequence[object]] = {}
  read = read_fields(architecture)
  for name, value in fields.items():
    own = name.startswith(f'{architecture.name}.')
    short = name.removeprefix(architecture.name) if own else name
    if short in read or name in SPLIT or any(re.fullmatch(known, short) for known in HARMLESS):
      continue
    unread[name] = value
    if short in NEUTRAL:
      neutral[name] = NEUTRAL[short]
  check_known(unread, (), neutral)


def _stretching(
  fields: Mapping[str, object], architecture: str, number: Callable[..., float]
) -> JsonObject:
  """Returns the attributes of stretched rotary positions, as llama.cpp reads the fields.

  Its kind is linear where there is a factor alone; a factor of 0 is none.
  """
  kind = fields.get(f'{architecture}.rope.scaling.type', 'linear')
  factors = {number(n, 0) for n in ('rope.scaling.factor', 'rope.scale_linear')} - {0, 1}
  if len(factors) > 1:
    raise UserError(f'{architecture}.rope.scaling.factor and rope.scale_linear disagree')
  factor = float(next(iter(factors), 1.0))
  if kind not in ('none', 'linear', 'yarn') or (kind == 'none' and factor != 1):
    raise UserError(
      f'{architecture}.rope.scaling.type={shortened(kind)} with a factor of {factor:g} is not '
      'implemented'
    )
  of_yarn = ('original_context_length', 'yarn_beta_fast', 'yarn_beta_slow')
  unused = [n for n in of_yarn if f'{architecture}.rope.scaling.{n}' in fields]
  # the files of Phi-3 repeat the length, which says nothing
  repeated = number('rope.scaling.original_context_length', -1) == number('context_length')
  unused = unused[repeated:]
  if kind != 'yarn' and unused:
    raise UserError(
      f'{architecture}.rope.scaling.{unused[0]} has no effect with rope.scaling.type '
      f'{kind}: one of them is wrong'
    )
  if factor == 1:
    return {}
  if kind == 'linear':
    return {'ROPE_FACTOR': factor, 'ROPE_SCALING': 'linear'}
  return {
    'ROPE_FACTOR': factor,
    'ROPE_SCALING': 'yarn',
    'ROPE_ORIGINAL_LENGTH': number(
      'rope.scaling.original_context_length', number('context_length')
    ),
    'ROPE_FAST_TURNS': number('rope.scaling.yarn_beta_fast', 32.0),
    'ROPE_SLOW_TURNS': number('rope.scaling.yarn_beta_slow', 1.0),
  }
