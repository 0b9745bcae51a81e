"""Trains text8k.model again: `python -m paxlite.data.packaged.build OUT.model`."""

import sys

from paxlite.data.packaged import TEXTS
from paxlite.data.text import split_blocks

_SENTENCE_CHARS = 3_000


def build(out: str, vocab_size: int = 8192) -> None:
  import sentencepiece

  def sentences():
    for path in TEXTS:
      for block, held_out in split_blocks(path):
        if not held_out:
          yield from (block[i : i + _SENTENCE_CHARS] for i in range(0, len(block), _SENTENCE_CHARS))

  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=sentences(),
    model_prefix=out.removesuffix('.model'),
    vocab_size=vocab_size,
    model_type='unigram',
    normalization_rule_name='identity',
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    byte_fallback=True,
    character_coverage=1.0,
    max_sentence_length=20_000,
    max_sentencepiece_length=24,
    unk_id=0,
    bos_id=1,
    eos_id=2,
    pad_id=-1,
  )


if __name__ == '__main__':
  build(sys.argv[1])
