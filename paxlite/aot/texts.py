"""Sizes and times as texts."""


def size(count: float | None) -> str:
  """Returns bytes with three digits: '1.25 GiB'; – for None."""
  if count is None:
    return '–'
  units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  while count >= 1000 and len(units) > 1:
    count /= 1024
    units.pop(0)
  digits = 0 if units[0] == 'B' or count >= 100 else 1 if count >= 10 else 2
  return f'{count:.{digits}f} {units[0]}'


def milliseconds(seconds: float | None) -> str:
  """Returns seconds as text: '486.7 ms', '0.0231 ms'; – for None."""
  if seconds is None:
    return '–'
  return f'{1e3 * seconds:,.1f} ms' if seconds >= 0.01 else f'{1e3 * seconds:.3g} ms'
