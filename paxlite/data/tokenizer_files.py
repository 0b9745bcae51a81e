"""The files of a published tokenizer, and what transformers' AutoTokenizer takes from them.

A tokenizer.json alone does not say which tokens begin and end a text. That is in
tokenizer_config.json, in special_tokens_map.json, or the default of the tokenizer's class, and the
class may follow from the model_type in config.json.
"""

import json
import pathlib
import zlib
from typing import NamedTuple

from paxlite.core.json_text import JsonObject
from paxlite.files.json_files import read_object

JSON, MODEL = 'tokenizer.json', 'tokenizer.model'
CONFIGURATION = 'tokenizer_config.json'
SPECIAL_TOKENS = 'special_tokens_map.json'
ADDED_TOKENS = 'added_tokens.json'
CHAT_TEMPLATE = 'chat_template.jinja'
TOOL_TEMPLATE = 'additional_chat_templates/tool_use.jinja'  # beside CHAT_TEMPLATE
TOKENIZERS = (JSON, MODEL)  # a folder's tokenizer is the first of these that exists
FILES = (
  *TOKENIZERS, CONFIGURATION, CHAT_TEMPLATE, TOOL_TEMPLATE, SPECIAL_TOKENS, ADDED_TOKENS
)  # fmt: skip

NAMED = tuple(f'{name}_token' for name in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask'))

# Classes of transformers that have a pipeline of their own, whatever tokenizer.json says, with the
# special tokens that they have where no file names them.
_END = '<|endoftext|>'
CLASSES: dict[str, dict[str, str]] = {
  'LlamaTokenizer': {'unk_token': '<unk>', 'bos_token': '<s>', 'eos_token': '</s>'},
  'CodeLlamaTokenizer': {'unk_token': '<unk>', 'bos_token': '<s>', 'eos_token': '</s>'},
  'GemmaTokenizer': {
    'unk_token': '<unk>', 'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<pad>',
    'mask_token': '<mask>',
  },
  'Qwen2Tokenizer': {'unk_token': _END, 'eos_token': _END, 'pad_token': _END},
  'GPT2Tokenizer': {'unk_token': _END, 'bos_token': _END, 'eos_token': _END},
  'GPTNeoXTokenizer': {
    'unk_token': _END, 'bos_token': _END, 'eos_token': _END, 'pad_token': '<|padding|>'
  },
}  # fmt: skip
# Special tokens that a class adds, whatever files say.
_ADDED = {'CodeLlamaTokenizer': ('▁<PRE>', '▁<MID>', '▁<SUF>', '▁<EOT>', '<FILL_ME>')}
PLAIN = 'TokenizersBackend'  # the class that takes tokenizer.json as it is

# The class that transformers registers for a model_type; None: it takes the one that is stated.
_REGISTERED = {
  'mistral': PLAIN,
  'mixtral': PLAIN,
  'olmo2': PLAIN,
  'olmo3': PLAIN,
  'phi3': PLAIN,
  'granite': PLAIN,
  'gemma': 'GemmaTokenizer',
  'gemma2': 'GemmaTokenizer',
  'gemma3': 'GemmaTokenizer',
  'gemma3_text': 'GemmaTokenizer',
  'qwen2': 'Qwen2Tokenizer',
  'qwen2_moe': 'Qwen2Tokenizer',
  'qwen3': 'Qwen2Tokenizer',
  'qwen3_moe': 'Qwen2Tokenizer',
  'gpt2': 'GPT2Tokenizer',
  'phi': 'GPT2Tokenizer',
  'gpt_neox': 'GPTNeoXTokenizer',
  'olmo': 'GPTNeoXTokenizer',
  'olmoe': 'GPTNeoXTokenizer',
}
# Keys of tokenizer_config.json that change ids; others are for people, templates and padding.
_OF_IDS = ('add_prefix_space', 'legacy', 'split_special_tokens')
_OVERRULED = ('qwen2', 'phi3')  # a model_type whose stated class is often wrong


class Published(NamedTuple):
  """What the files next to a tokenizer say.

  Attributes:
    configuration: The contents of tokenizer_config.json; {} if there is none.
    special_tokens: The text of each special token by its name, as in 'eos_token'.
    added_tokens: Other tokens that are special: their texts, or objects that describe them.
    tokenizer_class: One of CLASSES, or PLAIN; '' if no file names a class or a model.
  """

  configuration: JsonObject
  special_tokens: dict[str, str]
  added_tokens: list[str | JsonObject]
  tokenizer_class: str


def published(tokenizer_path: str) -> Published:
  """Reads the files next to a tokenizer as transformers does.

  Raises:
    UserError: One of them is not a JSON object.
  """
  folder = pathlib.Path(tokenizer_path).parent
  found = configuration(tokenizer_path)
  stated = {k: v for k, v in found.items() if k.endswith('_token')}
  decoder = found.get('added_tokens_decoder')
  if isinstance(decoder, dict):
    added = list(decoder.values())
  else:  # an older form, in which the map has the last word
    stated |= {k: v for k, v in _object(folder / SPECIAL_TOKENS).items() if k.endswith('_token')}
    added = sorted(ids := _object(folder / ADDED_TOKENS), key=lambda text: ids[text])
    added = [{'content': text, 'special': False} for text in added]
  kind = _class_of(folder, found)
  named = CLASSES.get(kind, {}) | stated
  tokens = {k: t for k, v in named.items() if (t := _text(v)) is not None}
  extra = found.get('extra_special_tokens') or found.get('additional_special_tokens') or []
  more = list(extra.values()) if isinstance(extra, dict) else extra
  more = [*(more if isinstance(more, list) else ()), *_ADDED.get(kind, ())]
  added = [t for t in (*added, *more) if _text(t)]
  return Published(found, tokens, added, kind)


def fingerprint(tokenizer_path: str) -> int:
  """Returns a checksum of a tokenizer, and of what the files next to it say on its ids."""
  contents = zlib.crc32(pathlib.Path(tokenizer_path).read_bytes())
  found = published(tokenizer_path)
  said = {k: v for k, v in found.configuration.items() if k in _OF_IDS}
  rest = found.tokenizer_class, found.special_tokens, found.added_tokens, said
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode(), contents)


def special_tokens(tokenizer_path: str) -> dict[str, str]:
  """Returns the texts of bos_token, eos_token …, which chat templates may use."""
  return published(tokenizer_path).special_tokens


def last_resort(tokenizer_path: str, name: str) -> str | None:
  """Returns a special token that special_tokens_map.json alone names, which transformers ignores.

  It does so where tokenizer_config.json lists the added tokens.
  """
  return _text(_object(pathlib.Path(tokenizer_path).parent / SPECIAL_TOKENS).get(name))


def configuration(tokenizer_path: str) -> JsonObject:
  """Returns the tokenizer_config.json next to a tokenizer; {} if there is none."""
  return _object(pathlib.Path(tokenizer_path).parent / CONFIGURATION)


def _class_of(folder: pathlib.Path, found: JsonObject) -> str:
  """Returns the class that AutoTokenizer loads the tokenizer of a folder with."""
  config = _object(folder / 'config.json')
  kind = config.get('model_type')
  registered = _REGISTERED.get(kind) if isinstance(kind, str) else None
  stated = found.get('tokenizer_class') or config.get('tokenizer_class')
  if not isinstance(stated, str):
    return registered or ('' if kind is None else PLAIN)
  stated = stated.removesuffix('Fast')
  if stated == 'LlamaTokenizer' and kind not in _OVERRULED and _is_byte_level(folder):
    return PLAIN
  if registered is not None and registered != stated:
    chosen = registered if kind in _OVERRULED else stated
    return chosen if registered != PLAIN and chosen in CLASSES else PLAIN
  return stated if stated in CLASSES else PLAIN


def _is_byte_level(folder: pathlib.Path) -> bool:
  file = folder / JSON
  return file.is_file() and b'"ByteLevel"' in file.read_bytes()


def _object(path: pathlib.Path) -> JsonObject:
  return read_object(path) if path.is_file() else {}


def _text(token: object) -> str | None:
  """Returns the text of a token, which a file has as a text or as an object."""
  text = token.get('content') if isinstance(token, dict) else token
  return text if isinstance(text, str) else None
