"""Text that ships with paxlite, so that the demo needs no download.

- king_james_bible.txt.xz and shakespeare.txt.xz: English prose and verse in the public domain.
- text8k.model: a SentencePiece unigram model of 8,192 pieces that keeps newlines, trained on those
  texts without their held-out blocks by `python -m paxlite.data.packaged.build`.
"""

import pathlib

_HERE = pathlib.Path(__file__).parent

TEXTS = [str(_HERE / 'king_james_bible.txt.xz'), str(_HERE / 'shakespeare.txt.xz')]
VOCAB = str(_HERE / 'text8k.model')
