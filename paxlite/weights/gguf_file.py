"""GGUF files of LLaMA models, which the package gguf dequantises, and the tokenizer in them."""

import json
import pathlib
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError, located
from paxlite.core.json_text import JsonObject
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.weights.families import published
from paxlite.weights.layout import Entry, check_layers, decoder_entries
from paxlite.weights.tensor_names import GGUF

# llama.cpp's names of pre-tokenizers, with their configuration for the package tokenizers.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_BYTE_LEVEL = {
  'type': 'ByteLevel',
  'add_prefix_space': False,
  'trim_offsets': True,
  'use_regex': True,
}
_PRE_TOKENIZERS: dict[str, list[JsonObject]] = {
  'gpt-2': [_BYTE_LEVEL],
  'smollm': [{'type': 'Digits', 'individual_digits': True}, _BYTE_LEVEL],
  'llama-bpe': [
    {'type': 'Split', 'pattern': {'Regex': _SPLIT}, 'behavior': 'Isolated', 'invert': False},
    _BYTE_LEVEL | {'use_regex': False},
  ],
}
_CONTROL = 3  # gguf's type of control tokens, which are not text


_T = TypeVar('_T')


class GgufTensors:
  """The tensors of a GGUF file in float32; only one tensor is in memory at a time.

  Raises:
    UserError: The file is not a GGUF file, is damaged or is truncated.
  """

  def __init__(self, path: pathlib.Path):
    try:
      import gguf
    except ImportError:
      raise UserError(f'GGUF files need the package gguf: {shell.install("weights")}') from None

    class Reader(gguf.GGUFReader):
      """A reader that raises EOFError at the end of the file.

      The reader of the package continues there, with up to 2**64 values without bytes.
      """

      def _get(self, offset, dtype, count=1, override_order=None):
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
          raise EOFError('it ends too early')
        return super()._get(offset, dtype, count, override_order)

    self._path = path
    try:
      reader = Reader(str(path))
      self.fields: Mapping[str, object] = {k: f.contents() for k, f in reader.fields.items()}
    except Exception as e:  # the package raises dozens of types
      raise UserError(f'{path} is no GGUF file, or is cut short ({e})') from None
    end, alignment = int(reader.data_offset), int(reader.alignment)
    for tensor in reader.tensors:  # llama.cpp also stores them without gaps
      if tensor.data_offset != end:
        raise UserError(f'{path} is damaged: {tensor.name} is not where the tensor before it ends')
      end += -(-tensor.n_bytes // alignment) * alignment
    self._dequantize = gguf.quants.dequantize
    self._tensors = {t.name: t for t in reader.tensors}
    # GGUF lists the innermost dimension first.
    self.shapes = {n: tuple(int(d) for d in t.shape[::-1]) for n, t in self._tensors.items()}

  def number(self, name: str, default: float | None = None) -> float:
    """Returns a field, an int or a float; raises UserError if it is missing or not a number."""
    value = self.fields.get(name, default)
    if value is None:
      raise UserError(f'{self._path} has no {name}')
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise UserError(f'{self._path}: {name} must be a number, not {value!r}')
    return value

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    try:
      return self._dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
    except NotImplementedError as e:  # the package gguf does not decode every type of tensor
      raise UserError(f'{self._path}: {name} cannot be read: {e}') from None


def read_file(path: pathlib.Path) -> tuple[LanguageModel, list[Entry], GgufTensors]:
  """Returns a GGUF file's experiment, the entries of the tensors it needs, and its tensors."""
  if path.is_dir():
    found = sorted(path.rglob('*.gguf'))
    if len(found) != 1:
      raise UserError(f'{path} holds {len(found)} .gguf files: --path must name one')
    path = found[0]
  if not path.is_file():
    raise UserError(f'{path} is not a file')
  tensors = GgufTensors(path)
  fields, number = tensors.fields, tensors.number
  architecture = fields.get('general.architecture')
  if architecture != 'llama':
    raise UserError(f'{path}: architecture {architecture!r} is not implemented; llama is')
  if 'llama.rope.scaling.type' in fields and fields['llama.rope.scaling.type'] != 'none':
    raise UserError(f'{path}: llama.rope.scaling is not implemented')
  embedding = tensors.shapes.get(GGUF['embedding'])
  if not embedding:
    raise UserError(f'{path} has no {GGUF["embedding"]}')
  heads, width = number('llama.attention.head_count'), number('llama.embedding_length')
  head_dim = number('llama.attention.key_length', width // heads if heads else 0)
  values = {
    'NUM_LAYERS': number('llama.block_count'),
    'NUM_HEADS': heads,
    'NUM_KV_HEADS': number('llama.attention.head_count_kv', heads),
    'MODEL_DIMS': width,
    'HIDDEN_DIMS': number('llama.feed_forward_length'),
    'DIMS_PER_HEAD': head_dim,
    'HEADS_SPAN_MODEL': heads * head_dim == width,
    'VOCAB_SIZE': embedding[0],
    'MAX_SEQ_LEN': number('llama.context_length'),
    'MAX_POSITION_EMBEDDINGS': number('llama.context_length'),
    'LAYERNORM_EPSILON': round(number('llama.attention.layer_norm_rms_epsilon'), 12),
    'ROPE_THETA': number('llama.rope.freq_base', 10_000.0),
    'SEPARATE_EMBEDDING': GGUF['head'] in tensors.shapes,
    'FPROP_DTYPE': 'float32',
  }
  if 'rope_freqs.weight' in tensors.shapes:
    raise UserError(
      f'{path} stretches rotary positions (rope_freqs.weight): import the Hugging Face folder'
    )
  if 'tokenizer.ggml.eos_token_id' in fields:
    values['EOS_IDS'] = [number('tokenizer.ggml.eos_token_id')]
  with located(str(path)):
    experiment = published(LLaMA, values)
    check_layers(experiment, tensors.shapes)
  return experiment, decoder_entries(experiment, GGUF, 'interleaved'), tensors


def write_tokenizer(fields: Mapping[str, object], folder: pathlib.Path) -> bool:
  """Writes the byte-level BPE tokenizer of a GGUF file as tokenizer.json.

  Returns:
    False, with nothing written, if the tokenizer is of another kind.

  Raises:
    UserError: The tokenizer is damaged.
  """
  pre = fields.get('tokenizer.ggml.pre')
  if fields.get('tokenizer.ggml.model') != 'gpt2' or pre not in list(_PRE_TOKENIZERS):
    return False
  tokens, merges, kinds = (
    _list(fields, f'tokenizer.ggml.{name}', of)
    for name, of in (('tokens', str), ('merges', str), ('token_type', int))
  )
  if len(kinds) != len(tokens):
    raise UserError(f'tokenizer.ggml has {len(tokens):,} tokens and {len(kinds):,} of token_type')
  special = [i for i, kind in enumerate(kinds) if kind == _CONTROL]
  added = [
    dict(id=i, content=tokens[i], special=True, lstrip=False, rstrip=False, normalized=False)
    | {'single_word': False}
    for i in special
  ]
  tokenizer = {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': added,
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': _PRE_TOKENIZERS[pre]},
    'post_processor': None,
    'decoder': _BYTE_LEVEL,
    'model': {
      'type': 'BPE',
      'vocab': {token: i for i, token in enumerate(tokens)},
      'merges': merges,
      'ignore_merges': pre == 'llama-bpe',
    },
  }
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer, ensure_ascii=False))
  config: JsonObject = {}
  for name in ('bos', 'eos'):
    number = fields.get(f'tokenizer.ggml.{name}_token_id')
    if number is not None:
      if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise UserError(
          f'tokenizer.ggml.{name}_token_id is none of {len(tokens):,} ids: {number!r}'
        )
      config[f'{name}_token'] = tokens[number]
  if 'tokenizer.chat_template' in fields:
    config['chat_template'] = fields['tokenizer.chat_template']
  (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
  open_tokenizer(str(folder))  # raises UserError if the tokenizer is not valid
  return True


def _list(fields: Mapping[str, object], name: str, of: type[_T]) -> list[_T]:
  found = fields.get(name)
  if not isinstance(found, list) or not all(isinstance(value, of) for value in found):
    raise UserError(f'{name} is missing, or no list of {of.__name__}')
  return found
