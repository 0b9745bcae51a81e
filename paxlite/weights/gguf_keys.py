"""The fields of a GGUF file, and the experiment that they describe.

Every field is read, known to be harmless, or refused, as every key of a config.json.
"""

import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.weights.families import end_ids, published
from paxlite.weights.gguf_file import SPLIT, GgufTensors, file_of
from paxlite.weights.known_keys import check_count, check_known, shortened
from paxlite.weights.layout import Entry, check_layers, decoder_entries
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
  r'general\.sampling\.\w+',
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

_ENDS = ('eos', 'eot', 'eom')
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
    experiment = _experiment(tensors)
    check_layers(experiment, tensors.shapes)
  return experiment, decoder_entries(experiment, GGUF, 'interleaved'), tensors


def _experiment(tensors: GgufTensors) -> LanguageModel:
  fields = tensors.fields
  kind = fields.get('general.type', 'model')
  if kind != 'model':
    hint = ': merge it into its model, with llama-export-lora' if kind == 'adapter' else ''
    raise UserError(f'it holds no model (general.type={shortened(kind)}){hint}')
  architecture = fields.get('general.architecture')
  if architecture != 'llama':
    raise UserError(f'architecture {shortened(architecture)} is not implemented; llama is')
  _check_fields(fields, architecture)
  embedding = tensors.shapes.get(GGUF['embedding'])
  if not embedding:
    raise UserError(f'it has no {GGUF["embedding"]}')
  if 'rope_freqs.weight' in tensors.shapes:
    raise UserError(
      'it stretches rotary positions (rope_freqs.weight): import the Hugging Face folder'
    )

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
  values |= _stretching(fields, architecture, number)
  experiment = published(LLaMA, values)
  named = (fields.get(f'tokenizer.ggml.{name}_token_id') for name in _ENDS)
  ends = end_ids([i for i in named if i is not None], experiment.VOCAB_SIZE)
  return experiment.replaced(EOS_IDS=ends)


def _check_fields(fields: Mapping[str, object], architecture: str) -> None:
  """Raises UserError for fields that may change what the model computes, and are not read."""
  unread: dict[str, object] = {}
  neutral: dict[str, Sequence[object]] = {}
  for name, value in fields.items():
    short = name.removeprefix(architecture) if name.startswith(f'{architecture}.') else name
    if short in READ or name in SPLIT or any(re.fullmatch(known, short) for known in HARMLESS):
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
