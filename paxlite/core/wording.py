"""Numbers and long texts in messages."""


def amount(count: float, noun: str) -> str:
  """Returns a number with its noun: '1 step', '2,000 steps', '1.5 steps'."""
  return f'{number(count)} {noun}{"" if count == 1 else "s"}'


def number(x: float) -> str:
  """Returns a number; small ones that are not whole have one digit after the point."""
  return f'{x:,.0f}' if x >= 100 or x == int(x) else f'{x:.1f}'


def shortened(text: str, most: int) -> str:
  """Returns a text, or its first `most` characters and how many follow."""
  if len(text) <= most:
    return text
  return f'{text[:most]} … ({len(text) - most:,} more characters)'
