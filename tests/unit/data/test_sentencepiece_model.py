"""The protocol buffer of SentencePiece, read and written without the package protobuf."""

import pathlib

import pytest
import sentencepiece

from paxlite.data import packaged, sentencepiece_model
from paxlite.data.tokenizer_training import train

TEXTS = [
  'In the beginning God created the heaven',
  '  two  spaces ',
  'café 中文\t😀',
  '</s><s>',
  '',
]


def models() -> dict[str, bytes]:
  lines = [f'word{i % 37} the and of {i}' for i in range(400)]
  made = {kind: train(lines, 310, kind) for kind in ('unigram', 'bpe')}
  return made | {'packaged': (pathlib.Path(packaged.__path__[0]) / 'text8k.model').read_bytes()}


@pytest.mark.parametrize('name', ['unigram', 'bpe', 'packaged'])
def test_a_model_that_is_written_again_encodes_the_same(name):
  content = models()[name]
  model = sentencepiece_model.parsed(content)
  assert model.kind == (sentencepiece_model.BPE if name == 'bpe' else sentencepiece_model.UNIGRAM)
  special = {'unk': '<unk>', 'bos': '<s>', 'eos': '</s>'}
  back = sentencepiece_model.serialized(model, special)
  assert sentencepiece_model.parsed(back) == model
  before, after = (
    sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in (content, back)
  )
  ids = lambda m: (m.unk_id(), m.bos_id(), m.eos_id(), m.pad_id())
  assert ids(before) == ids(after) == (0, 1, 2, -1)
  for text in TEXTS:
    assert before.encode(text) == after.encode(text)
    assert before.decode(before.encode(text)) == after.decode(before.encode(text))


def test_a_special_piece_that_is_left_out_is_none():
  model = sentencepiece_model.parsed(models()['bpe'])
  back = sentencepiece_model.serialized(model, {'unk': '<unk>', 'eos': '</s>'})
  opened = sentencepiece.SentencePieceProcessor(model_proto=back)
  assert (opened.bos_id(), opened.eos_id()) == (-1, 2)
