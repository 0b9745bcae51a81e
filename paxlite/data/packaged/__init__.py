"""Text that ships with paxlite, so that the demo needs no download.

- king_james_bible.txt.xz and shakespeare.txt.xz: English prose and verse in the public domain.
- text8k.model: a SentencePiece unigram model of 8,192 pieces that keeps newlines, trained on those
  texts without their held-out blocks by `python -m paxlite.tokenization.packaged`.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent
TEXTS = [str(FOLDER / 'king_james_bible.txt.xz'), str(FOLDER / 'shakespeare.txt.xz')]
VOCAB = str(FOLDER / 'text8k.model')
