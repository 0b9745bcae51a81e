"""Holds documents and examples out of training, chosen by hashes of their contents.

A choice depends on nothing but the contents. So a file that is added, moved, copied or compressed
again changes the side of no document, and equal documents are on one side.
"""

import math
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from paxlite.data.base import mix

RULE = 'contents'  # what checkpoints call this way of choosing; earlier versions had others


def text_identity(text: str) -> int:
  """Returns the checksum of a document by which it is chosen."""
  return zlib.crc32(text.encode('utf-8', 'surrogatepass'))


def is_held_out(identity: int, share: float) -> bool:
  """Returns whether the contents with this checksum are held out, as a share of all contents is."""
  return int(mix(np.uint64(identity + 1))) < share * 2**64


def largest_every(identities: Iterable[int]) -> int:
  """Returns the largest N of which one out of N is held out, and of these at least one; 0: none."""
  least = min((int(mix(np.uint64(identity + 1))) for identity in identities), default=1 << 64)
  return (1 << 64) // (least + 1)


def held_out(identities: Sequence[int] | np.ndarray, share: float) -> np.ndarray:
  """Returns whether each example [n] is held out; of few examples, at least one is."""
  mixed = mix(np.array(identities).astype(np.uint64) + np.uint64(1))
  here = mixed < min(math.ceil(share * 2**64), 2**64 - 1)
  return here if here.any() else mixed == mixed.min()
