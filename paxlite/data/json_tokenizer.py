"""Tokenizers of Hugging Face: a folder's files, read as transformers' AutoTokenizer reads them."""

import functools
import pathlib
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.data import sentencepiece_model
from paxlite.data.byte_tokens import ByteTokens
from paxlite.data.sentencepiece_pipeline import added_pieces, plain_tokenizer, tokenizer_of_class
from paxlite.data.special_guard import SpecialGuard
from paxlite.data.tokenizer_files import (
  CLASSES,
  JSON,
  MODEL,
  NAMED,
  PLAIN,
  check_model,
  fingerprint,
  former_tokens,
  last_resort,
  published,
  say_unread,
  text_of,
)
from paxlite.data.tokenizer_growth import check_growth
from paxlite.data.tokens import Tokens

# The pattern of words of Qwen2Tokenizer.
_QWEN2 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# What transformers replaces in decoded text where clean_up_tokenization_spaces is true.
_CLEANED = (
  (' .', '.'), (' ?', '?'), (' !', '!'), (' ,', ','), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
  (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class JsonTokenizer:
  """A Tokenizer from a Hugging Face tokenizer.json or tokenizer.model, and the files next to it."""

  def __init__(self, path: str):
    try:
      import tokenizers
    except ImportError:
      raise UserError(
        f'the tokenizer {path} needs the package tokenizers: {shell.install("weights")}'
      ) from None

    self.path = path
    self._guards: dict[frozenset[str], SpecialGuard] = {}  # by the texts of special tokens
    self._files = published(path)
    say_unread(path)
    try:
      if path.endswith('.model'):
        self._read_pieces()
      else:
        self._tokenizer = tokenizers.Tokenizer.from_file(path)
    except UserError:
      raise
    except BaseException as e:
      if _is_of_library(e):
        kind = MODEL if path.endswith('.model') else JSON
        raise UserError(f'the tokenizer {path} is not a {kind} ({e})') from None
      raise
    if path.endswith('.json'):
      check_growth(path, 'normalizer', self._tokenizer.normalizer)
      check_growth(path, 'decoder', self._tokenizer.decoder)
    # The file may enable truncation or padding, but texts must be encoded in full and unpadded.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    # It adds BOS and EOS, which `frame` asks for, and would cut spaces off the offsets of tokens.
    self._post_processor = self._tokenizer.post_processor
    self._tokenizer.post_processor = None
    self._tokens_of_file = list(self._tokenizer.get_added_tokens_decoder().values())
    if self._files.tokenizer_class in CLASSES:
      self._become(self._files.tokenizer_class)
    self._tokenizer.encode_special_tokens = bool(
      self._files.configuration.get('split_special_tokens', False)
    )
    self._add_special_tokens()
    if path.endswith('.model'):
      self._post_processor = self._frame()

  @property
  def pipeline(self) -> JsonObject:
    """The contents of a tokenizer.json that encodes texts as this tokenizer does, without BOS."""
    return parsed(self._tokenizer.to_str())

  @property
  def follows_model(self) -> bool:
    """Whether a tokenizer.model says how texts are split, and not the class of transformers."""
    return self.path.endswith('.model') and self._files.tokenizer_class == PLAIN

  @functools.cached_property
  def fingerprint(self) -> int:
    is_former = self.path.endswith('.json') and self._finds_former_tokens()
    return fingerprint(self.path, is_former)

  @functools.cached_property
  def is_token(self) -> np.ndarray:
    ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
    found = np.zeros(max(ids, default=-1) + 1, bool)
    found[ids] = True
    return found

  @property
  def vocab_size(self) -> int:
    return len(self.is_token)

  @functools.cached_property
  def added_texts(self) -> dict[int, str]:
    return {i: x.content for i, x in sorted(self._tokenizer.get_added_tokens_decoder().items())}

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    found = self._tokenizer.get_added_tokens_decoder()
    return frozenset(i for i, token in found.items() if token.special)

  @property
  def named_tokens(self) -> dict[str, str]:
    return self._files.special_tokens

  @property
  def bos_id(self) -> int | None:
    return self.start_ids[0] if self.start_ids else None

  @functools.cached_property
  def start_ids(self) -> list[int]:
    if self._post_processor is None:
      return []
    texts = ('a', '0', ' ', '')
    plain = next((e for t in texts if (e := self._encoding(t)).ids), self._encoding(''))
    framed = self._guarded('encode a text', self._post_processor.process, plain, None, True)
    if not plain.ids:  # nothing says where the text would be
      return [] if framed.ids == [self.eos_id] else framed.ids[:1]
    mask = list(framed.special_tokens_mask)
    return framed.ids[: mask.index(0)] if 0 in mask else framed.ids[:1]

  @functools.cached_property
  def eos_id(self) -> int | None:
    return self.special_id('eos_token')

  def special_id(self, name: Literal['bos_token', 'eos_token']) -> int | None:
    token = self._files.special_tokens.get(name) or last_resort(self.path, name)
    return None if token is None else self._tokenizer.token_to_id(token)

  @functools.cached_property
  def unk_id(self) -> int | None:
    model = self._tokenizer.model
    if type(model).__name__ == 'Unigram':
      return parsed(model.__getstate__()).get('unk_id')
    return None if model.unk_token is None else self._tokenizer.token_to_id(model.unk_token)

  def encode(self, text: str) -> list[int]:
    return self._encoding(text).ids

  def encode_array(self, text: str) -> np.ndarray:
    # Faster, because it does not compute where in the text each token is.
    method = self._tokenizer.encode_batch_fast
    (encoded,) = self._guarded('encode a text', method, [text], add_special_tokens=False)
    return np.array(encoded.ids, np.uint32)

  def encode_tokens(self, text: str, marked: bool = False) -> Tokens:
    if self._byte_tokens is not None:
      found = self._byte_tokens.located(self.encode_array(text), text)
      if found is not None:
        return found
    encoded = self._encoding(text)
    offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    return Tokens(np.array(encoded.ids, np.int32), offsets[:, 0], offsets[:, 1])

  @functools.cached_property
  def _byte_tokens(self) -> ByteTokens | None:
    """The bytes of the tokens; None if they are not those of the texts that are encoded."""
    probe = 'a b'
    found = ByteTokens(self._tokenizer.get_vocab(with_added_tokens=False), self.added_texts)
    return None if found.located(self.encode_array(probe), probe) is None else found

  def encode_quoted(
    self, text: str, plain: Sequence[tuple[int, int]], special: Collection[str]
  ) -> list[int]:
    if self._tokenizer.encode_special_tokens:  # they are text everywhere
      special = [x for x in special if self._tokenizer.token_to_id(x) not in self.special_ids]
    key = frozenset(special)
    if key not in self._guards:
      self._guards[key] = SpecialGuard(self.pipeline, key)
    encoded = self._encoding(text)
    if self._guards[key].is_forged(text, plain, encoded.ids, encoded.offsets):
      return list(self._guarded('encode a text', self._guards[key].encoded, text, plain))
    return list(encoded.ids)

  def decode(self, ids: Iterable[int]) -> str:
    return self._cleaned(self._guarded('decode ids', self._tokenizer.decode, _plain(ids)))

  def decode_marked(self, ids: Iterable[int]) -> str:
    decode = self._tokenizer.decode
    return self._cleaned(
      self._guarded('decode ids', decode, _plain(ids), skip_special_tokens=False)
    )

  def piece(self, token: int) -> str:
    return self._tokenizer.id_to_token(int(token)) or ''

  def _encoding(self, text: str) -> Any:
    return self._guarded('encode a text', self._tokenizer.encode, text, add_special_tokens=False)

  def _guarded(self, does: str, method: Any, *args: object, **kwargs: object) -> Any:
    """Calls a method of the library; raises UserError if the tokenizer file makes it fail."""
    try:
      return method(*args, **kwargs)
    except BaseException as e:
      if not _is_of_library(e):
        raise
      raise UserError(f'the tokenizer {self.path} cannot {does} ({e})') from None

  def _cleaned(self, text: str) -> str:
    if self._files.configuration.get('clean_up_tokenization_spaces') is not True or self._is_bpe:
      return text
    return functools.reduce(lambda t, pair: t.replace(*pair), _CLEANED, text)

  @property
  def _is_bpe(self) -> bool:
    return type(self._tokenizer.model).__name__ == 'BPE'

  def _become(self, name: str) -> None:
    """Gives the tokenizer the pipeline of a class of transformers, instead of that of the file."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    if not self._is_bpe:  # such a class takes no other model
      return
    stated = self._files.configuration
    if isinstance(stated.get('added_tokens_decoder'), dict):  # which lists all tokens
      self._tokenizer = Tokenizer(self._tokenizer.model)
    tokenizer, model = self._tokenizer, self._tokenizer.model
    space = bool(stated.get('add_prefix_space') or False)
    tokenizer.normalizer, tokenizer.decoder = None, decoders.ByteLevel()
    model.fuse_unk = name in ('LlamaTokenizer', 'CodeLlamaTokenizer', 'GemmaTokenizer')
    model.byte_fallback = model.fuse_unk
    has_unk = name in ('CodeLlamaTokenizer', 'GemmaTokenizer')
    model.unk_token = self._files.special_tokens['unk_token'] if has_unk else None
    match name:
      case 'LlamaTokenizer' | 'CodeLlamaTokenizer':
        space = True if stated.get('add_prefix_space') is None else space
        always = bool(stated.get('legacy')) and name == 'LlamaTokenizer'
        scheme = 'never' if not space else 'always' if always else 'first'
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace('▁', prepend_scheme=scheme, split=False)
        strips = space or name == 'CodeLlamaTokenizer'
        strip = [decoders.Strip(content=' ', left=1)] if strips else []
        tokenizer.decoder = decoders.Sequence(
          [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
      case 'GemmaTokenizer':
        tokenizer.normalizer = normalizers.Replace(' ', '▁')
        tokenizer.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
        tokenizer.decoder = decoders.Sequence(
          [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
        )
      case 'Qwen2Tokenizer':
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
          [
            pre_tokenizers.Split(Regex(_QWEN2), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
          ]
        )
      case 'GPT2Tokenizer' | 'GPTNeoXTokenizer':
        if name == 'GPTNeoXTokenizer':
          tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)

  def _read_pieces(self) -> None:
    """Makes the tokenizer of a SentencePiece model, and takes the names of its special pieces."""
    files, content = self._files, pathlib.Path(self.path).read_bytes()
    check_model(self.path)
    model = sentencepiece_model.parsed(content)
    is_plain = files.tokenizer_class == PLAIN
    extra, added = files.extra_tokens, files.added_tokens
    if is_plain:
      renamed = {i: str(token['content']) for i, token in added.items()}
      legacy = bool(files.configuration.get('legacy', True))
      self._tokenizer = plain_tokenizer(model, self.path, renamed, legacy)
      pieces = {'bos_token': model.bos, 'eos_token': model.eos, 'unk_token': model.unk}
      own = {
        name: text for name, text in pieces.items()
        if text is not None and name not in files.configuration
      }  # fmt: skip
      files = files._replace(
        special_tokens=own | files.special_tokens, named_tokens=own | files.named_tokens
      )
      if model.adds_prefix:
        added = {i: token | {'normalized': False} for i, token in added.items()}
    else:
      self._tokenizer = tokenizer_of_class(model)
    extra = [*added_pieces(model, is_plain)] if extra is None else extra
    self._files = files._replace(added_tokens=added, extra_tokens=extra)

  def _frame(self) -> Any:
    """Returns what puts BOS before a text and EOS behind it, where the files ask for them."""
    from tokenizers import processors

    asked = {n: self._files.configuration.get(f'add_{n}_token') for n in ('bos', 'eos')}
    tokens = {n: self._files.special_tokens.get(f'{n}_token') for n in asked if asked[n]}
    bos, eos = ([token] if (token := tokens.get(name)) else [] for name in ('bos', 'eos'))
    ids = [(token, self._tokenizer.token_to_id(token)) for token in dict.fromkeys([*bos, *eos])]
    return processors.TemplateProcessing(single=[*bos, '$A', *eos], special_tokens=ids)

  def _add_special_tokens(self) -> None:
    """Adds the tokens that the files next to the tokenizer know, as transformers does.

    A special token that is an ordinary one in tokenizer.json is found in texts as a whole, and what
    tokenizer_config.json says of a token has the last word.
    """
    files = self._files
    known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
    names = set(files.special_tokens.values())
    added = [_added(token, names) for token in files.added_tokens.values()]
    known |= {token.content for token in added}
    for token in (*files.named_tokens.values(), *(files.extra_tokens or ())):
      made = _added(token, names)
      if made.content and made.content not in known:
        known.add(made.content)
        added.append(made)
    self._tokenizer.add_tokens(added)
    if files.tokenizer_class == 'Qwen2Tokenizer':  # which adds them again, without their flags
      special = [*names, *filter(None, map(text_of, files.extra_tokens or ()))]
      self._tokenizer.add_tokens([_added(text, names) for text in special])

  def _finds_former_tokens(self) -> bool:
    """Returns whether the added tokens found in texts are the `former_tokens`.

    Those of tokenizer.json had the last word then.
    """
    from tokenizers import Tokenizer

    special, added = former_tokens(self.path)
    named = [special[name] for name in NAMED if name in special]
    former, known = Tokenizer(self._tokenizer.model), {t.content for t in self._tokens_of_file}
    former.add_tokens(self._tokens_of_file)
    for token in (*added, *named):
      made = _added(token, named)
      if made.content not in known:
        known.add(made.content)
        former.add_tokens([made])
    then, now = (t.get_added_tokens_decoder() for t in (former, self._tokenizer))
    finds = lambda found: {i: self._how_found(token) for i, token in found.items()}
    return finds(then) == finds(now)

  def _how_found(self, token: Any) -> tuple[object, ...]:
    """Returns the attributes of an added token that decide where texts have it."""
    is_normalized = token.normalized and self._tokenizer.normalizer is not None
    is_text = token.special and self._tokenizer.encode_special_tokens
    return token.content, token.lstrip, token.rstrip, token.single_word, is_normalized, is_text


def _added(token: Json, names: Container[str]) -> Any:
  """Returns a token that the library finds in texts; `names` are those of special tokens."""
  from tokenizers import AddedToken

  told: JsonObject = dict(token) if isinstance(token, dict) else {'content': token}
  text = str(told['content'])
  flags = {k: bool(told[k]) for k in ('lstrip', 'rstrip', 'single_word') if k in told}
  special = bool(told.get('special', not isinstance(token, dict))) or text in names
  normalized = bool(told.get('normalized', not special))
  return AddedToken(text, special=special, normalized=normalized, **flags)


def _plain(ids: Iterable[int]) -> list[int]:
  return [int(i) for i in ids]


def _is_of_library(e: BaseException) -> bool:
  """Returns whether the library tokenizers raised the exception.

  A panic in its Rust code is a BaseException but not an Exception, so it is recognized by its name.
  Other exceptions of this kind, such as KeyboardInterrupt, do not come from the library.
  """
  return isinstance(e, Exception) or type(e).__name__ == 'PanicException'
