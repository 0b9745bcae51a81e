"""The pages of a cache that rows share: which are free, and how many rows read each."""

from collections.abc import Sequence

from paxlite.generation.cache import Pages


class PagePool:
  """Gives pages to rows, and takes them back.

  A row's pages are a list of numbers, in the order of its tokens. Several rows may read a page,
  which is full then: none of them writes into it.

  Args:
    pages: How many there are, and how many tokens each has.
  """

  def __init__(self, pages: Pages):
    self._pages = pages
    self.reset()

  def reset(self) -> None:
    """Takes back all pages."""
    self._free = [*range(self._pages.count)]
    self._readers = [0] * self._pages.count

  @property
  def num_pages(self) -> int:
    return self._pages.count

  @property
  def num_free(self) -> int:
    """The number of pages that no row reads."""
    return len(self._free)

  def missing(self, held: Sequence[int], tokens: int) -> int:
    """Returns how many pages more a row needs for so many tokens."""
    return max(0, -(-tokens // self._pages.size) - len(held))

  def grow(self, held: list[int], tokens: int) -> bool:
    """Gives a row pages for so many tokens, if there are enough; returns whether there were."""
    count = self.missing(held, tokens)
    if count > len(self._free):
      return False
    taken = [self._free.pop() for _ in range(count)]
    for page in taken:
      self._readers[page] = 1
    held += taken
    return True

  def shared(self, held: Sequence[int], tokens: int) -> list[int]:
    """Returns the pages that are full with a row's first tokens, for another row."""
    full = [*held[: tokens // self._pages.size]]
    for page in full:
      self._readers[page] += 1
    return full

  def release(self, held: list[int]) -> None:
    """Takes back the pages of a row, of which those that no other row reads become free."""
    for page in held:
      self._readers[page] -= 1
      if not self._readers[page]:
        self._free.append(page)
    held.clear()
