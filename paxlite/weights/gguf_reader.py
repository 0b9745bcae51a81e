"""A GGUF file as a proof sees it: its tensors, and what it says of a model and its tokenizer.

The package gguf reads the file. The model is known beforehand, and the fields are compared with
those that an export of it has; nothing here makes a model of a file.
"""

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.data import sentencepiece_model as sentencepiece
from paxlite.files.text_files import check_file
from paxlite.weights.config_keys import Config
from paxlite.weights.gguf_architecture import PATTERN, ROPE_FREQS, Architecture
from paxlite.weights.gguf_families import model_fields

# tokenizers with scores
_PIECES = {'llama': sentencepiece.BPE, 'gemma4': sentencepiece.BPE, 't5': sentencepiece.UNIGRAM}


class GgufTensors:
  """The fields and tensors of a GGUF file; tensors are read one at a time, in float32.

  Raises UserError if it is not a GGUF file, or is cut short.

  Args:
    architecture: The architecture of its model.

  Attributes:
    fields: The values of its fields by name.
    shapes: The shapes of its tensors by name, with the innermost dimension last.
  """

  def __init__(self, path: pathlib.Path, architecture: Architecture):
    try:
      from gguf import GGUFReader
    except ImportError:
      raise UserError(f'GGUF files need the package gguf: {shell.install("weights")}') from None

    class Reader(GGUFReader):
      """Does not read past the end of a file, where the package finds empty arrays."""

      def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
          raise ValueError('it ends too early')
        return found

    check_file(path)
    try:
      reader = Reader(path)
      if reader.byte_order != 'I':
        raise ValueError("it has another machine's byte order")
      self.fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError) as e:
      raise UserError(f'{path} is not a GGUF file, or is cut short ({e})') from None
    self._path, self._architecture = path, architecture
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    self.shapes = {t.name: tuple(map(int, t.shape[::-1])) for t in reader.tensors}

  @property
  def kinds(self) -> dict[str, str]:
    """The type of each tensor, as gguf names it: F32, Q8_0 …"""
    return {name: tensor.tensor_type.name for name, tensor in self._tensors.items()}

  def stored(self, name: str) -> np.ndarray:
    """Returns the bytes of a tensor, uint8."""
    return np.ascontiguousarray(self._tensors[name].data).view(np.uint8)

  def read(self, name: str) -> np.ndarray:
    from gguf import quants

    tensor = self._tensors[name]
    try:
      values = quants.dequantize(self.stored(name), tensor.tensor_type)
    except NotImplementedError as e:  # the package gguf does not decode every type of tensor
      raise UserError(f'{self._path}: {name} cannot be read: {e}') from None
    return values.reshape(self.shapes[name]) - np.float32(self._architecture.offset(name))


def other_config(architecture: Architecture, config: Config, file: GgufTensors) -> JsonObject:
  """Returns the keys of config.json of which a file says something else, with its values."""
  if (name := file.fields.get('general.architecture')) != architecture.name:
    return {'model_type': name}
  found: JsonObject = {}
  for name, value in model_fields(architecture, config).items():
    stated = file.fields.get(name, value)
    if isinstance(value, float) and isinstance(stated, float):  # the file has a float32
      stated = value if np.float32(value) == np.float32(stated) else stated
    if stated != value:
      short = name.removeprefix(f'{architecture.name}.')
      other = {PATTERN: 'layer_types'}.get(short, short)
      other = 'rope_scaling' if short.startswith('rope.scaling.') else other
      found[architecture.fields.get(short, other)] = stated
  expected = architecture.constants(config).get(ROPE_FREQS)
  own = file.read(ROPE_FREQS) if ROPE_FREQS in file.shapes else None
  same = own is expected if own is None or expected is None else np.allclose(own, expected, 1e-4)
  return found if same else found | {'rope_scaling': ROPE_FREQS}


def unread(architecture: Architecture, config: Config, file: GgufTensors) -> list[str]:
  """Returns the fields of a model in a file that an export does not write."""
  known = model_fields(architecture, config)
  return sorted(n for n in file.fields if n.startswith(f'{architecture.name}.') and n not in known)


def text_facts(fields: Mapping[str, Any]) -> JsonObject:
  """Returns what a file says of its tokenizer and chat template, as a proof has it.

  Raises UserError if the fields do not have the values of a tokenizer.
  """
  try:
    return _text_facts(fields)
  except (LookupError, TypeError, ValueError, AttributeError) as e:
    raise UserError(f'the fields of its tokenizer are damaged ({e})') from None


def _text_facts(fields: Mapping[str, Any]) -> JsonObject:
  of = lambda name, default=None: fields.get(f'tokenizer.ggml.{name}', default)
  if of('model', 'none') == 'none':
    return {'tokenizer': None}
  begins = of('add_bos_token', of('model') in _PIECES or of('pre') == 'llama-bpe')
  named = (of(f'{name}_token_id') for name in ('eos', 'eot', 'eom'))
  ends = list(dict.fromkeys(i for i in named if i is not None))
  key = 'tokenizer.chat_template'
  templates = {
    name.removeprefix(key).removeprefix('.') or 'default': text
    for name, text in fields.items()
    if name.startswith(key)
  }
  return {
    'tokenizer': _vocabulary(fields, begins),
    'chat_template': zlib.crc32(json.dumps(templates, sort_keys=True).encode())
    if templates
    else None,
    'start_ids': [of('bos_token_id')] if begins else [],
    'eos_ids': ends,
    'chat_eos_ids': ends,
  }


def _vocabulary(fields: Mapping[str, Any], begins: bool) -> JsonObject:
  """Returns the number of tokens and the checksum that the tokenizer has in other formats, too."""
  of = lambda name, default=None: fields.get(f'tokenizer.ggml.{name}', default)
  tokens, kinds = of('tokens', []), of('token_type', [])
  used = [i for i, kind in enumerate(kinds) if kind != sentencepiece.UNUSED]
  if of('model') not in _PIECES:
    special = (sentencepiece.UNKNOWN, sentencepiece.CONTROL)
    named = (
      [(i, tokens[i]) for i in used],
      of('merges', []),
      [i for i in used if kinds[i] in special],
    )
    crc32 = zlib.crc32(json.dumps(named).encode())
    return {'kind': 'merges', 'tokens': len(used), 'crc32': crc32}
  # llama.cpp finds these in texts as they are, where SentencePiece has another character
  spelled = lambda i: (
    tokens[i].replace(' ', '▁') if kinds[i] == sentencepiece.USER_DEFINED else tokens[i]
  )
  count = max(used, default=-1) + 1  # the model has more ids than the tokenizer
  pieces = [
    sentencepiece.Piece(spelled(i), score, kinds[i])
    for i, score in enumerate(of('scores', [])[:count])
  ]
  names = {'unk': 'unknown', 'eos': 'eos'} | ({'bos': 'bos'} if begins else {})
  ids = {name: of(f'{theirs}_token_id') for name, theirs in names.items()}
  model = sentencepiece.SentencePieceModel(
    pieces, _PIECES[of('model')], bytes(of('precompiled_charsmap', [])),
    of('add_space_prefix', True), of('remove_extra_whitespaces', True),
    byte_fallback=sentencepiece.BYTE in kinds,
    **{name: tokens[i] for name, i in ids.items() if i is not None},
  )  # fmt: skip
  return {'kind': 'pieces', 'tokens': len(pieces), 'crc32': zlib.crc32(repr(model).encode())}
