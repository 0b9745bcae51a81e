"""The files of a published tokenizer, and what transformers' AutoTokenizer takes from them.

A tokenizer.json alone does not say which tokens begin and end a text. That is in
tokenizer_config.json, in special_tokens_map.json, or the default of the tokenizer's class, and the
class may follow from the model_type in config.json.
"""

import functools
import json
import logging
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json, JsonObject
from paxlite.files.json_files import read_object

log = logging.getLogger('paxlite')

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
_PLAIN_NAMES = (PLAIN, 'PreTrainedTokenizer', 'LlamaTokenizer')
OF_PIECES = ('LlamaTokenizer', 'CodeLlamaTokenizer', 'GemmaTokenizer')  # may have a tokenizer.model

# The class that transformers registers for a model_type; None: it takes the one that is stated.
_REGISTERED = {
  'mistral': PLAIN, 'mixtral': PLAIN, 'olmo2': PLAIN, 'olmo3': PLAIN, 'phi3': PLAIN,
  'granite': PLAIN, 'gemma': 'GemmaTokenizer', 'gemma2': 'GemmaTokenizer',
  'gemma3': 'GemmaTokenizer', 'gemma3_text': 'GemmaTokenizer', 'qwen2': 'Qwen2Tokenizer',
  'qwen2_moe': 'Qwen2Tokenizer', 'qwen3': 'Qwen2Tokenizer', 'qwen3_moe': 'Qwen2Tokenizer',
  'gpt2': 'GPT2Tokenizer', 'phi': 'GPT2Tokenizer', 'gpt_neox': 'GPTNeoXTokenizer',
  'olmo': 'GPTNeoXTokenizer', 'olmoe': 'GPTNeoXTokenizer',
}  # fmt: skip
# Keys of tokenizer_config.json that are read, besides the names of special tokens.
_OF_IDS = ('add_prefix_space', 'legacy', 'split_special_tokens')
_ADDS = ('added_tokens_decoder', 'extra_special_tokens', 'additional_special_tokens')
_FRAMES = ('add_bos_token', 'add_eos_token')  # a tokenizer.json frames texts itself
READ = (
  *_OF_IDS, *_ADDS, *_FRAMES, 'tokenizer_class', 'clean_up_tokenization_spaces', 'chat_template'
)  # fmt: skip
# Keys that change no id, by the reason for which they do not.
_HARMLESS = {
  'padding, cutting, and what a call returns': (
    'model_max_length', 'max_length', 'max_len', 'max_len_single_sentence',
    'max_len_sentences_pair', 'padding', 'padding_side', 'pad_to_multiple_of',
    'pad_token_type_id', 'truncation', 'truncation_side', 'truncation_strategy', 'stride',
    'model_input_names', 'return_token_type_ids',
  ),
  'names of files, models and classes': (
    'name_or_path', 'tokenizer_file', 'vocab_file', 'merges_file', 'special_tokens_map_file',
    'added_tokens_file', 'processor_class', 'image_processor_class', 'auto_map', 'backend',
    'is_local', 'local_files_only', 'transformers_version', 'device_map', 'trust_remote_code',
  ),
  'a choice between implementations with the same ids': ('use_fast', 'from_slow', 'tokenizer_type'),
  'text of conversations': (
    'use_default_system_prompt', 'response_template', 'response_schema', 'chat_control_tokens',
  ),
  'decoding by classes that are written in Python': ('spaces_between_special_tokens', 'errors'),
  'settings of SentencePiece, which transformers does not call': ('sp_model_kwargs',),
  'ids of tokens that are named by their texts': (
    'bos_token_id', 'eos_token_id', 'pad_token_id', 'unk_token_id',
  ),
}  # fmt: skip
_RULE = 2  # of fingerprints: the number of the reader, whose first one had none
_OVERRULED = ('qwen2', 'phi3')  # a model_type whose stated class is often wrong


class Published(NamedTuple):
  """The settings in the files next to a tokenizer."""

  configuration: JsonObject  # the contents of tokenizer_config.json; {} if there is none
  special_tokens: dict[str, str]  # the text of each special token by its name, as in 'eos_token'
  # the same as the files have them: texts, or objects that describe a token
  named_tokens: dict[str, Json]
  # objects that describe the tokens which were added to the tokenizer, by their ids
  added_tokens: dict[int, JsonObject]
  # other tokens that are special: texts or objects; None: the files do not say
  extra_tokens: list[str | JsonObject] | None
  tokenizer_class: str  # one of CLASSES, or PLAIN; '' if no file names a class or a model


def published(tokenizer_path: str) -> Published:
  """Reads the files next to a tokenizer as transformers does.

  Raises UserError if one of them is not a JSON object.
  """
  folder = pathlib.Path(tokenizer_path).parent
  found = configuration(tokenizer_path)
  stated = {k: v for k, v in found.items() if k.endswith('_token')}
  extra = found.get('extra_special_tokens')
  extra = extra or found.get('additional_special_tokens', extra)  # [] says that there are none
  if isinstance(extra, dict):
    stated, extra = stated | extra, None
  extra = extra if isinstance(extra, list) else None
  decoder = found.get('added_tokens_decoder')
  if isinstance(decoder, dict):
    added = _by_id(decoder, folder / CONFIGURATION)
  else:  # an older form, in which the map has the last word
    older = _object(folder / SPECIAL_TOKENS)
    stated |= {k: v for k, v in older.items() if k.endswith('_token')}
    special = set(map(text_of, extra or ()))
    if isinstance(more := older.get('extra_special_tokens'), list):
      extra = [*(extra or ()), *more]
    elif tokenizer_path.endswith('.json') and extra is None:
      more = older.get('additional_special_tokens')
      extra = more if isinstance(more, list) else None
    added = {
      i: {'content': text, 'special': text in special} for text, i in _ids(folder / ADDED_TOKENS)
    }
  kind = _class_of(folder, found)
  named = {k: v for k, v in (CLASSES.get(kind, {}) | stated).items() if text_of(v) is not None}
  named = {k: named[k] for k in (*NAMED, *named) if k in named}
  more = [t for t in (*(extra or ()), *_ADDED.get(kind, ())) if text_of(t)]
  is_said = bool(more) or isinstance(extra, list)
  texts = {k: str(text_of(v)) for k, v in named.items()}
  return Published(found, texts, named, added, more if is_said else None, kind)


def _by_id(decoder: JsonObject, path: pathlib.Path) -> dict[int, JsonObject]:
  """Returns the tokens of added_tokens_decoder in the order of their ids."""
  is_wrong = lambda i, token: not (i.isdecimal() and isinstance(token, dict) and text_of(token))
  wrong = [i for i, token in decoder.items() if is_wrong(i, token)]
  if wrong:
    raise UserError(f'{path}: added_tokens_decoder has no token for {wrong[0]!r}')
  return {int(i): decoder[i] for i in sorted(decoder, key=int)}


def _ids(path: pathlib.Path) -> list[tuple[str, int]]:
  """Returns the tokens of an added_tokens.json and their ids, in the order of these."""
  found = _object(path)
  for token, i in found.items():
    if not isinstance(i, int) or isinstance(i, bool):
      raise UserError(f'{path}: the id of {token!r} is {i!r}, not a number')
  return sorted(found.items(), key=lambda entry: entry[1])


def fingerprint(tokenizer_path: str, is_former: bool = True) -> int:
  """Returns a checksum of a tokenizer, and of what the files next to it say on its ids.

  Args:
    is_former: Whether the first version that had such checksums gave texts the same ids; then it is
      that version's checksum, so that its runs go on.
  """
  contents = zlib.crc32(pathlib.Path(tokenizer_path).read_bytes())
  found = published(tokenizer_path)
  said = {k: v for k, v in found.configuration.items() if k in _OF_IDS}
  rest: Sequence[object] = (*former_tokens(tokenizer_path), said)
  if not is_former:
    rest = _RULE, found.named_tokens, found.added_tokens, found.extra_tokens, said
  return zlib.crc32(json.dumps([found.tokenizer_class, *rest], sort_keys=True).encode(), contents)


def former_tokens(tokenizer_path: str) -> tuple[dict[str, str], list[Json]]:
  """Returns the special and the added tokens that the first version with checksums knew."""
  folder = pathlib.Path(tokenizer_path).parent
  found = configuration(tokenizer_path)
  kind = _class_of(folder, found)
  named = CLASSES.get(kind, {}) | {k: v for k, v in found.items() if k.endswith('_token')}
  decoder = found.get('added_tokens_decoder')
  added: list[Json] = list(decoder.values()) if isinstance(decoder, dict) else []
  if not isinstance(decoder, dict):
    named |= {k: v for k, v in _object(folder / SPECIAL_TOKENS).items() if k.endswith('_token')}
    added = [{'content': text, 'special': False} for text, _ in _ids(folder / ADDED_TOKENS)]
  extra = found.get('extra_special_tokens') or found.get('additional_special_tokens')
  extra = list(extra.values()) if isinstance(extra, dict) else extra
  added += [*(extra if isinstance(extra, list) else ()), *_ADDED.get(kind, ())]
  special = {k: text for k, v in named.items() if (text := text_of(v)) is not None}
  return special, [token for token in added if text_of(token)]


def say_unread(tokenizer_path: str) -> None:
  """Warns of keys in tokenizer_config.json that nobody reads, once for each file."""
  fields = Fields(configuration(tokenizer_path))
  harmless = [key for keys in _HARMLESS.values() for key in keys]
  names = [key for key in fields.values() if key.endswith('_token')]
  for key in (*READ, *harmless, *names):
    fields.get(key)
  if unread := fields.unread():
    path = pathlib.Path(tokenizer_path).with_name(CONFIGURATION)
    _say(f'{path}: {", ".join(sorted(unread))}: not read, which may change the ids of texts')


@functools.cache
def _say(warning: str) -> None:
  log.warning('%s', warning)


def check_model(tokenizer_path: str) -> None:
  """Raises UserError if transformers reads a tokenizer.model in a way that is not supported."""
  folder, found = pathlib.Path(tokenizer_path).parent, published(tokenizer_path)
  way_out = (
    f'. Let transformers write its {JSON}: '
    "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('FOLDER')"
  )
  if not found.tokenizer_class:
    changing = [k for k in (*_ADDS, *_FRAMES, 'add_prefix_space') if found.configuration.get(k)]
    changing += [ADDED_TOKENS] * bool(found.added_tokens and not changing)
    if changing:
      raise UserError(
        f'{folder}: {changing[0]} changes the ids of {MODEL}, and no file names the class of '
        f'transformers that reads it. Write "tokenizer_class": "LlamaTokenizer" into '
        f'{CONFIGURATION}, if that is the one'
      )
    return
  stated = str(found.configuration.get('tokenizer_class') or PLAIN).removesuffix('Fast')
  kind = _object(folder / 'config.json').get('model_type')
  if found.tokenizer_class == PLAIN and stated not in _PLAIN_NAMES and kind not in _REGISTERED:
    raise UserError(
      f'{folder}: the class {stated} of {CONFIGURATION} is not supported for {MODEL}{way_out}'
    )
  if found.tokenizer_class not in (PLAIN, *OF_PIECES):
    raise UserError(f'{folder}: the class {found.tokenizer_class} reads no {MODEL}{way_out}')


def special_tokens(tokenizer_path: str) -> dict[str, str]:
  """Returns the texts of bos_token, eos_token …, which chat templates may use."""
  return published(tokenizer_path).special_tokens


def last_resort(tokenizer_path: str, name: str) -> str | None:
  """Returns a special token that special_tokens_map.json alone names, which transformers ignores.

  It does so where tokenizer_config.json lists the added tokens.
  """
  return text_of(_object(pathlib.Path(tokenizer_path).parent / SPECIAL_TOKENS).get(name))


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


def text_of(token: object) -> str | None:
  """Returns the text of a token, which a file has as a text or as an object."""
  text = token.get('content') if isinstance(token, dict) else token
  return text if isinstance(text, str) else None
