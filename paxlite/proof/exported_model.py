"""A model in any format that paxlite reads, and what identifies it.

It is a folder of Hugging Face, a GGUF file, imported weights, or a run.
"""

import contextlib
import json
import pathlib
import re
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxlite.chats.chat_format import NoTemplate
from paxlite.chats.model_texts import encoding_of
from paxlite.checkpointing.source import Source, find_source, tokenizer_of
from paxlite.core.errors import UserError, listed, located
from paxlite.core.json_text import JsonObject
from paxlite.data import sentencepiece_model
from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.data.tokenizer import open_tokenizer
from paxlite.data.tokenizer_copies import tokenizer_files
from paxlite.experiments.language_model import LanguageModel
from paxlite.generation.inference import Inference, experiment_of, load_checkpoint
from paxlite.weights import folder, gguf_reader, huggingface
from paxlite.weights.families import config_json
from paxlite.weights.families import experiment_of as experiment_of_config
from paxlite.weights.gguf_architecture import ROPE_FREQS
from paxlite.weights.gguf_families import architecture_of
from paxlite.weights.known_keys import HARMLESS
from paxlite.weights.tensor_entries import Entry

# How coarse tensors are, from the finest: the names of safetensors, of gguf and of numpy.
_TYPES = (
  ('f32', 'F32', 'float32'), ('f16', 'F16', 'float16'), ('bf16', 'BF16', 'bfloat16'),
  ('q8_0', 'Q8_0'), ('q4_k', 'Q4_K'),
)  # fmt: skip


class ExportedModel(NamedTuple):
  """A model that is there to be read."""

  path: pathlib.Path  # where it is
  format: str  # hf, gguf or paxlite
  experiment: LanguageModel
  # the checksum of each tensor; none of paxlite's own weights, which no proof has
  tensors: dict[str, int]
  type: str  # the coarsest type of its matrices
  config: JsonObject  # the keys of config.json that decide what it computes
  # the path of its tokenizer, if it has one that texts can be encoded with
  tokenizer: pathlib.Path | None
  entries: Sequence[Entry] = ()  # the entries of its tensors; none of paxlite's own weights
  # its tensors, which are read one at a time; None for paxlite's own weights
  stored: folder.Tensors | None = None
  # what a GGUF file says of its tokenizer, and of what else it holds
  stated: JsonObject | None = None

  def facts(self) -> JsonObject:
    """Returns what identifies the model, as a proof has it."""
    found: JsonObject = {
      'format': self.format, 'type': self.type, 'config': self.config, 'tensors': self.tensors,
      'tokenizer': None,
    } | (self.stated or {})  # fmt: skip
    if self.tokenizer is None:
      return found
    tokenizer = open_tokenizer(str(self.tokenizer))
    encoding = encoding_of(self.experiment, tokenizer)
    try:
      template = zlib.crc32(json.dumps(encoding.chat_format.texts, sort_keys=True).encode())
    except NoTemplate:
      template = None
    return found | {
      'tokenizer': _vocabulary(tokenizer.path), 'chat_template': template,
      'start_ids': encoding.start_ids, 'eos_ids': encoding.eos_ids,
      'chat_eos_ids': encoding.chat_eos_ids,
    }  # fmt: skip

  @contextlib.contextmanager
  def inference(self) -> Iterator[Inference]:
    """A context that yields the model in float32, for which its weights are copied if need be."""
    overrides = {'FPROP_DTYPE': 'float32'}
    if self.stored is None:
      yield load_checkpoint(str(self.path), overrides=overrides)
      return
    with tempfile.TemporaryDirectory(prefix='paxlite-proof-') as parent:
      to = pathlib.Path(parent) / 'weights'
      silent = lambda done, total: None
      source = self.tokenizer or _numbers(pathlib.Path(parent), self.experiment.VOCAB_SIZE)
      folder.write_weights(to, self.experiment, self.entries, self.stored, source, silent)
      yield load_checkpoint(str(to), overrides=overrides)


def opened(path: pathlib.Path, config: JsonObject) -> ExportedModel:
  """Returns the model at a path.

  Raises UserError if there is none, or it is damaged or not implemented.

  Args:
    path: A folder or a file.
    config: The config of the model that is expected, which tells how a GGUF file is read; see
      `config_of`.
  """
  if not path.exists():
    raise UserError(f'{path} does not exist')
  is_folder = path.is_dir()
  if path.suffix == '.gguf' or (is_folder and any(path.glob('*.gguf'))):
    return _of_gguf(path, config)
  if is_folder and (path / 'config.json').is_file() and any(path.glob('*.safetensors')):
    return _of_hugging_face(path)
  return _of_paxlite(find_source(path), path)


def _of_gguf(path: pathlib.Path, expected: JsonObject) -> ExportedModel:
  if path.is_dir():
    files = sorted(path.glob('*.gguf'))
    if len(files) > 1:
      raise UserError(f'{path} holds {len(files)} .gguf files: name one')
    path = files[0]
  experiment = experiment_of_config(expected, path)
  architecture, config = architecture_of(experiment)
  file = gguf_reader.GgufTensors(path, architecture)
  with located(str(path)):
    other = gguf_reader.other_config(architecture, config, file)
    stated = gguf_reader.text_facts(file.fields)
    entries = architecture.entries(experiment)
    if not other:
      folder.check_tensors(entries, file.shapes, re.escape(ROPE_FREQS))
  if unread := gguf_reader.unread(architecture, config, file):
    stated |= {'unproven': [f'the fields {listed(unread)}, which no export writes']}
  matrices = [kind for name, kind in file.kinds.items() if len(file.shapes[name]) > 1]
  return ExportedModel(
    path, 'gguf', experiment, {name: zlib.crc32(file.stored(name)) for name in file.shapes},
    _coarsest(matrices), config_of(experiment) | other, None, entries, file, stated,
  )  # fmt: skip


def _numbers(parent: pathlib.Path, count: int) -> pathlib.Path:
  """Writes a tokenizer that has ids alone, for a model without one that can encode texts."""
  model = {'type': 'WordLevel', 'vocab': {str(i): i for i in range(count)}, 'unk_token': '0'}
  path = parent / 'tokenizer.json'
  path.write_text(json.dumps({'version': '1.0', 'added_tokens': [], 'model': model}))
  return path


def _of_hugging_face(path: pathlib.Path) -> ExportedModel:
  experiment, entries, tensors = huggingface.read_folder(path)
  folder.check_tensors(entries, tensors.shapes, huggingface.IGNORED)
  checksums: dict[str, int] = {}
  dtypes = set()
  for name, shape in tensors.shapes.items():
    value = tensors.read(name)
    checksums[name] = _checksum(value)
    if len(shape) > 1:
      dtypes.add(value.dtype.name)
  tokenizer = path if tokenizer_files(path) else None
  kind = _coarsest(sorted(dtypes))
  config = config_of(experiment)
  return ExportedModel(path, 'hf', experiment, checksums, kind, config, tokenizer, entries, tensors)


def _of_paxlite(source: Source, path: pathlib.Path) -> ExportedModel:
  variables = source.unrolled_params()
  kind = _coarsest([v.dtype.name for v in variables.values() if len(v.shape) > 1])
  experiment, tokenizer = experiment_of(source), tokenizer_of(path)
  return ExportedModel(path, 'paxlite', experiment, {}, kind, config_of(experiment), tokenizer)


def _checksum(value: np.ndarray) -> int:
  return zlib.crc32(np.ascontiguousarray(value).view(np.uint8))


def _coarsest(found: Sequence[str]) -> str:
  """Returns the coarsest of several types; q4_k stands for those that are not known."""
  numbers = [
    next((i for i, t in enumerate(_TYPES) if name in t), len(_TYPES) - 1) for name in found
  ]
  return _TYPES[max(numbers, default=0)][0]


def config_of(e: LanguageModel) -> JsonObject:
  """Returns the keys of config.json that decide what the model computes."""
  config = {k: v for k, v in config_json(e, 'float32', None).items() if k not in HARMLESS}
  window, positions = config.get('sliding_window'), config.get('max_position_embeddings')
  if window and positions and window >= positions:
    config['sliding_window'] = None  # no text is longer, so that a format may leave it out
  kind = config_json(e, 'float32', None)['model_type']
  return {'model_type': {'mistral': 'llama'}.get(kind, kind)} | config


def _vocabulary(path: str) -> JsonObject:
  """Returns the number of tokens and a checksum of a tokenizer's tokens and merges."""
  if not path.endswith('.json'):
    model = sentencepiece_model.parsed(pathlib.Path(path).read_bytes())
    crc32 = zlib.crc32(repr(model).encode())
    return {'kind': 'pieces', 'tokens': len(model.pieces), 'crc32': crc32}
  pipeline = JsonTokenizer(path).pipeline
  model, added = pipeline['model'], pipeline['added_tokens']
  tokens = model['vocab']
  if isinstance(tokens, dict):
    ids = {i: token for token, i in tokens.items()} | {t['id']: t['content'] for t in added}
    tokens = sorted(ids.items())
  merges = [m if isinstance(m, str) else ' '.join(m) for m in model.get('merges', ())]
  special = sorted(t['id'] for t in added if t['special'])
  text = json.dumps([tokens, merges, special])
  return {'kind': 'merges', 'tokens': len(tokens), 'crc32': zlib.crc32(text.encode())}
