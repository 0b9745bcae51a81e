"""Limits the Parquet rows decoded at once, so that a small file cannot fill the memory.

A column may name one long value of its dictionary in every row. So a file of some kilobytes can
hold gigabytes, and its footer does not say so.
"""

from collections.abc import Callable
from typing import Any

from paxlite.core import host_memory
from paxlite.core.errors import UserError

BATCH_BYTES = 1 << 28  # of the rows that are decoded at a time; no record is larger
_MOST_ROWS = 1 << 14
_WIDTH = 16  # bytes of a number, at most
_DICTIONARY_PAGE = 2  # a type of page
_I32_FIELD = 0x15  # the compact protocol of Thrift: a field of 32 bits after the one before it


def rows_at_once(file: Any, number: int, read: Callable[[int, int], bytes], name: str) -> int:
  """Returns how many rows of a row group take at most about BATCH_BYTES, at least one.

  Args:
    file: The footer, pyarrow's FileMetaData.
    number: The row group, which has rows.
    read: Returns a number of bytes of the file from an offset on.
    name: The file, for error messages.

  Raises:
    UserError: Lists of numbers in the row group may not fit in memory, as one row may have all.
  """
  group = file.row_group(number)
  left = host_memory.available()
  for i in range(group.num_columns):
    values = group.column(i).num_values
    if file.schema.column(i).max_repetition_level and left and values * _WIDTH > left:
      raise UserError(
        f'{name}: row group {number} has {values:,} values in its lists, which may not fit in '
        'memory: write the file again with smaller row groups'
      )
  most = sum(_row_bytes(group.column(i), group.num_rows, read) for i in range(group.num_columns))
  return max(1, min(_MOST_ROWS, int(BATCH_BYTES / max(most, 1))))


def _row_bytes(column: Any, rows: int, read: Callable[[int, int], bytes]) -> float:
  """Returns the most bytes of a column in a row, on average over the rows of the group."""
  values = column.num_values / rows
  if column.physical_type not in ('BYTE_ARRAY', 'FIXED_LEN_BYTE_ARRAY'):
    return values * _WIDTH
  plain = column.total_uncompressed_size
  longest = _dictionary_bytes(column, read)
  if 'DELTA_BYTE_ARRAY' in column.encodings:  # A value repeats the beginning of the one before it.
    longest = max(longest, plain)
  return values * (longest + _WIDTH) + plain / rows


def _dictionary_bytes(column: Any, read: Callable[[int, int], bytes]) -> int:
  """Returns the size of a column's dictionary, which no value in it exceeds; 0 if it has none."""
  begin = column.data_page_offset
  if column.dictionary_page_offset:  # Some writers put 0 for none.
    begin = min(begin, column.dictionary_page_offset)
  header = read(begin, 16)
  kind, at = _number(header, 0)
  size, _ = _number(header, at)
  return size if kind == _DICTIONARY_PAGE else 0


def _number(header: bytes, at: int) -> tuple[int, int]:
  """Returns the number in the field at a position of a page's header, and where the field ends."""
  if at >= len(header) or header[at] != _I32_FIELD:
    raise ValueError('the header of a page is damaged')
  value = shift = 0
  for end in range(at + 1, len(header)):
    value |= (header[end] & 0x7F) << shift
    shift += 7
    if header[end] < 0x80:
      return (value >> 1) ^ -(value & 1), end + 1
  raise ValueError('the header of a page is damaged')
