"""GGUF files of LLaMA models, dequantized by the package gguf, and the tokenizer in them."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxlite.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.weights.families import published
from paxlite.weights.layout import GGUF, Entry, llama_entries

# llama.cpp's names of pre-tokenizers, as tokenizers' own configuration
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
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
  'gpt-2': [_BYTE_LEVEL],
  'smollm': [{'type': 'Digits', 'individual_digits': True}, _BYTE_LEVEL],
  'llama-bpe': [
    {'type': 'Split', 'pattern': {'Regex': _SPLIT}, 'behavior': 'Isolated', 'invert': False},
    _BYTE_LEVEL | {'use_regex': False},
  ],
}
_CONTROL = 3  # gguf's type of tokens that are no text


class GgufTensors:
  """The tensors of a GGUF file in float32; no more than one is in memory.

  Raises:
    UserError: it is no GGUF file, or is cut short.
  """

  def __init__(self, path: pathlib.Path):
    try:
      import gguf
    except ImportError:
      raise UserError("GGUF files need the package gguf: pip install 'paxlite[weights]'") from None

    try:
      self._reader = gguf.GGUFReader(str(path))
    except Exception as e:
      raise UserError(f'{path} is no GGUF file, or is cut short ({e})') from None
    self._dequantize = gguf.quants.dequantize
    self._tensors = {t.name: t for t in self._reader.tensors}
    # GGUF counts dimensions from the innermost
    self.shapes = {n: tuple(int(d) for d in t.shape[::-1]) for n, t in self._tensors.items()}

  @property
  def fields(self) -> Mapping[str, Any]:
    return {k: f.contents() for k, f in self._reader.fields.items()}

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    return self._dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])


def read_file(path: pathlib.Path) -> tuple[LanguageModel, list[Entry], GgufTensors]:
  """A GGUF file's experiment, the tensors that it must have, and those that it has."""
  if path.is_dir():
    found = sorted(path.rglob('*.gguf'))
    if len(found) != 1:
      raise UserError(f'{path} holds {len(found)} .gguf files: --path must name one')
    path = found[0]
  if not path.is_file():
    raise UserError(f'{path} is not a file')
  tensors = GgufTensors(path)
  fields = tensors.fields
  architecture = fields.get('general.architecture')
  if architecture != 'llama':
    raise UserError(f'{path}: architecture {architecture!r} is not implemented; llama is')
  if 'llama.rope.scaling.type' in fields and fields['llama.rope.scaling.type'] != 'none':
    raise UserError(f'{path}: llama.rope.scaling is not implemented')
  try:
    heads = int(fields['llama.attention.head_count'])
    width = int(fields['llama.embedding_length'])
    head_dim = int(fields.get('llama.attention.key_length', width // heads))
    values = {
      'NUM_LAYERS': int(fields['llama.block_count']),
      'NUM_HEADS': heads,
      'NUM_KV_HEADS': int(fields.get('llama.attention.head_count_kv', heads)),
      'MODEL_DIMS': width,
      'HIDDEN_DIMS': int(fields['llama.feed_forward_length']),
      'DIMS_PER_HEAD': head_dim,
      'HEADS_SPAN_MODEL': heads * head_dim == width,
      'VOCAB_SIZE': tensors.shapes[GGUF['embedding']][0],
      'MAX_SEQ_LEN': int(fields['llama.context_length']),
      'LAYERNORM_EPSILON': round(float(fields['llama.attention.layer_norm_rms_epsilon']), 12),
      'ROPE_THETA': float(fields.get('llama.rope.freq_base', 10_000.0)),
      'SEPARATE_EMBEDDING': GGUF['head'] in tensors.shapes,
      'FPROP_DTYPE': 'float32',
    }
  except KeyError as e:
    raise UserError(f'{path} has no {e.args[0]}') from None
  except (TypeError, ValueError, ZeroDivisionError) as e:
    raise UserError(f'{path} has a value that cannot be ({e})') from None
  if 'rope_freqs.weight' in tensors.shapes:
    raise UserError(
      f'{path} stretches rotary positions (rope_freqs.weight): import the Hugging Face folder'
    )
  if 'tokenizer.ggml.eos_token_id' in fields:
    values['EOS_IDS'] = [int(fields['tokenizer.ggml.eos_token_id'])]
  experiment = published(LLaMA, values)
  return experiment, llama_entries(experiment, GGUF, 'interleaved'), tensors


def write_tokenizer(fields: Mapping[str, Any], folder: pathlib.Path) -> bool:
  """Writes the byte-level BPE tokenizer of a GGUF file as tokenizer.json; False for other kinds."""
  pre_tokenizer = _PRE_TOKENIZERS.get(fields.get('tokenizer.ggml.pre', ''))
  if fields.get('tokenizer.ggml.model') != 'gpt2' or pre_tokenizer is None:
    return False
  tokens = fields['tokenizer.ggml.tokens']
  kinds = fields['tokenizer.ggml.token_type']
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
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': pre_tokenizer},
    'post_processor': None,
    'decoder': _BYTE_LEVEL,
    'model': {
      'type': 'BPE',
      'vocab': {token: i for i, token in enumerate(tokens)},
      'merges': fields['tokenizer.ggml.merges'],
      'ignore_merges': fields['tokenizer.ggml.pre'] == 'llama-bpe',
    },
  }
  (folder / 'tokenizer.json').write_text(json.dumps(tokenizer, ensure_ascii=False))
  config: dict[str, Any] = {}
  for name in ('bos', 'eos'):
    if f'tokenizer.ggml.{name}_token_id' in fields:
      config[f'{name}_token'] = tokens[int(fields[f'tokenizer.ggml.{name}_token_id'])]
  if 'tokenizer.chat_template' in fields:
    config['chat_template'] = fields['tokenizer.chat_template']
  (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2) + '\n')
  return True
