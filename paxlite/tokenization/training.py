"""Trains SentencePiece tokenizers on samples of documents, in bounded memory."""

import heapq
import io
import random
from collections.abc import Iterable, Iterator

from paxlite.core.errors import UserError

_PIECE_CHARS = 3_000


def pieces_of(text: str) -> Iterator[str]:
  """Cuts a text into the pieces, of at most 3,000 characters, that a tokenizer is trained on."""
  return (text[i : i + _PIECE_CHARS] for i in range(0, len(text), _PIECE_CHARS))


def sample(documents: Iterable[str], most_chars: int) -> tuple[list[str], int]:
  """Returns a random sample of pieces of the documents, in their order, and the size of all.

  Each piece gets a random number from a fixed seed, and those with the smallest numbers are kept.
  So the sample depends on the documents alone, and only it is in memory.

  Args:
    documents: Their texts.
    most_chars: Largest number of characters of the sample.

  Returns:
    The pieces, and the number of characters of all documents.
  """
  random_numbers = random.Random(0)
  kept: list[tuple[float, int, str]] = []  # a heap whose first piece has the largest random number
  size = total = 0
  for number, piece in enumerate(p for text in documents for p in pieces_of(text)):
    total += len(piece)
    size += len(piece)
    heapq.heappush(kept, (-random_numbers.random(), number, piece))
    while size > most_chars:
      size -= len(heapq.heappop(kept)[2])
  return [piece for _, _, piece in sorted(kept, key=lambda entry: entry[1])], total


def train(
  pieces: Iterable[str], vocab_size: int, model_type: str = 'unigram', coverage: float = 1.0
) -> bytes:
  """Returns a SentencePiece model that keeps white space and encodes unknown characters as bytes.

  The same pieces give the same model.

  Args:
    pieces: The pieces of text.
    vocab_size: Number of its ids. The first are those of unknown text, BOS and EOS, and 256 bytes.
    model_type: 'unigram' or 'bpe'.
    coverage: Share of the text's characters that get ids; bytes encode the rarest others.

  Raises:
    UserError: There is too little text for so many ids, or so few ids are too few.
  """
  import sentencepiece

  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(pieces),
      model_writer=model,
      vocab_size=vocab_size,
      model_type=model_type,
      character_coverage=coverage,
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      byte_fallback=True,
      max_sentence_length=20_000,
      max_sentencepiece_length=24,
      unk_id=0,
      bos_id=1,
      eos_id=2,
      pad_id=-1,
      minloglevel=2,
    )
  except RuntimeError as e:
    reason = ' '.join(str(e).rpartition(']')[2].split()) or 'no text found'
    raise UserError(f'no tokenizer of {vocab_size:,} ids can be made: {reason}') from None
  return model.getvalue()
