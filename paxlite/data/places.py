"""Places: where a document or a record is."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a text is."""

  source: str  # the file, folder or dataset; '' if even that is not known
  # its record, numbered as in error messages: the line of a file, the row of a table
  record: int | None = None
  detail: str = ''  # what else is known, as the characters of a text file
  unknown: str = ''  # why the record is not known; '' if it is

  def __str__(self) -> str:
    name = self.source if self.record is None else f'{self.source}:{self.record}'
    text = ', '.join(filter(None, (name, self.detail)))
    return f'{text} (record unknown: {self.unknown})' if self.unknown else text

  @classmethod
  def of(cls, text: str) -> 'Place':
    """Returns the place that an error message calls FILE:RECORD."""
    source, colon, number = text.rpartition(':')
    return cls(source, int(number)) if colon and number.isdecimal() else cls(text)
