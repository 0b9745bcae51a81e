"""Tokenizers that make a text much longer before they split it."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import open_tokenizer


def save(folder, normalizer=None, decoder=None):
  tokenizer = Tokenizer(models.BPE({'a': 0, 'b': 1, '▁': 2}, []))
  if normalizer is not None:
    tokenizer.normalizer = normalizer
  if decoder is not None:
    tokenizer.decoder = decoder
  tokenizer.save(str(folder / 'tokenizer.json'))
  return str(folder / 'tokenizer.json')


def charsmap(*texts):
  trie = bytes(1024)
  return len(trie).to_bytes(4, 'little') + trie + b''.join(t.encode() + b'\0' for t in texts)


@pytest.mark.parametrize(
  'normalizer',
  [
    normalizers.Sequence([normalizers.Replace('a', 'aa')] * 7),
    normalizers.Sequence([normalizers.Sequence([normalizers.Replace('a', 'a' * 11)])] * 2),
    normalizers.Replace('a', 'b' * 101),
    normalizers.Replace(Regex('x*'), 'b' * 100),
    normalizers.Prepend('▁' * 10_001),
    normalizers.Precompiled(charsmap('b' * 101)),
  ],
)
def test_a_normalizer_that_grows_is_refused(tmp_path, normalizer):
  with pytest.raises(UserError, match=r'the normalizer of the tokenizer .* more than 100 times as'):
    open_tokenizer(save(tmp_path, normalizer))


def test_a_decoder_that_grows_is_refused(tmp_path):
  decoder = decoders.Sequence([decoders.Replace('a', 'aa')] * 7)
  with pytest.raises(UserError, match='the decoder of the tokenizer'):
    open_tokenizer(save(tmp_path, decoder=decoder))


def test_those_of_published_tokenizers_are_taken(tmp_path):
  normalizer = normalizers.Sequence([
    normalizers.NFKC(),
    normalizers.Prepend('▁'),
    normalizers.Replace(' ', '▁'),
    normalizers.Replace(Regex(' {2,}'), '▁'),
    normalizers.Replace('``', '"'),
    normalizers.BertNormalizer(),
    normalizers.Precompiled(charsmap('صلى الله عليه وسلم', '...')),
  ])  # fmt: skip
  assert open_tokenizer(save(tmp_path, normalizer, decoders.Replace('▁', ' '))).encode('ab')
