"""Prints texts of others: answers of models, records, names in files, fields of requests."""

_KEPT = '\n\t'
# control characters, and those that change the direction of what is printed
_CODES = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: repr(chr(code))[1:-1] for code in _CODES if chr(code) not in _KEPT}


def printable(text: str) -> str:
  r"""Returns a text that cannot change a terminal: control characters are escaped, as \x1b.

  Line breaks and tabs stay.
  """
  return text.replace('\r\n', '\n').translate(_ESCAPED)
