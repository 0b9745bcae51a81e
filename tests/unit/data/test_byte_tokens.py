"""Places of tokens that follow from their bytes are those of the library."""

import random

import numpy as np
import pytest
from tokenizers import normalizers

from paxlite.data.json_tokenizer import JsonTokenizer
from tests.support.tokenizer_draws import (
  SPLITS,
  TEMPLATES,
  byte_level_tokenizer,
  draw_text,
  draw_tokenizer,
)


def check(folder, seed: int) -> int:
  """Compares the tokens of drawn texts; returns how many were placed by their bytes."""
  tokenizer, placed = JsonTokenizer(str(folder / 'tokenizer.json')), 0
  for i in range(60):
    text = draw_text(random.Random(f'{seed} {i}'), [*tokenizer.added_texts.values()])
    expected, found = tokenizer._encoding(text), tokenizer.encode_tokens(text)
    starts, ends = np.array(expected.offsets, np.int64).reshape(-1, 2).T
    for one, other in zip((np.array(expected.ids, np.int32), starts, ends), found, strict=True):
      np.testing.assert_array_equal(other, one, repr(text))
      assert one.dtype == other.dtype
    by_bytes = tokenizer._byte_tokens
    placed += by_bytes is not None and by_bytes.located(found.ids, text) is not None
  return placed


@pytest.mark.parametrize('normalizer', [None, normalizers.NFC()], ids=['', 'nfc'])
@pytest.mark.parametrize('kind', ['gpt2', *SPLITS])
def test_places_of_published_kinds(tmp_path, kind, normalizer):
  byte_level_tokenizer(SPLITS.get(kind, []), normalizer).save(str(tmp_path / 'tokenizer.json'))
  assert check(tmp_path, 0) > 40


@pytest.mark.cases(fast=6, slow=14)
@pytest.mark.parametrize('seed', range(20))
def test_places_of_drawn_tokenizers(tmp_path, seed):
  """Of all kinds, also such as change a text."""
  draw_tokenizer(random.Random(seed), tmp_path, TEMPLATES['chatml'])
  check(tmp_path, seed)
