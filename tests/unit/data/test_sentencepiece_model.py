"""The protocol buffer of SentencePiece, read without the package protobuf."""

import pathlib

import pytest
import sentencepiece

from paxlite.data import packaged, sentencepiece_model
from paxlite.tokenization.training import train


def models() -> dict[str, bytes]:
  lines = [f'word{i % 37} the and of {i}' for i in range(400)]
  made = {kind: train(lines, 310, kind) for kind in ('unigram', 'bpe')}
  return made | {'packaged': (pathlib.Path(packaged.__path__[0]) / 'text8k.model').read_bytes()}


@pytest.mark.parametrize('name', ['unigram', 'bpe', 'packaged'])
def test_the_contents_are_those_that_sentencepiece_reads(name):
  content = models()[name]
  model = sentencepiece_model.parsed(content)
  assert model.kind == (sentencepiece_model.BPE if name == 'bpe' else sentencepiece_model.UNIGRAM)
  theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
  assert (model.unk, model.bos, model.eos) == ('<unk>', '<s>', '</s>')
  assert len(model.pieces) == theirs.get_piece_size()
  for i, piece in enumerate(model.pieces):
    assert (piece.text, piece.score) == (theirs.id_to_piece(i), theirs.get_score(i))
    assert (piece.kind == sentencepiece_model.CONTROL) == theirs.is_control(i)
    assert (piece.kind == sentencepiece_model.UNKNOWN) == theirs.is_unknown(i)
    assert (piece.kind == sentencepiece_model.BYTE) == theirs.is_byte(i)
