"""Draws curves as SVG."""

import html
import math
from collections.abc import Mapping, Sequence

from paxlite.report.records import Points

# eight colors that people with any kind of color vision can tell apart, by Okabe and Ito
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#666666', '#b8a800')
_DASHES = ('none', '7 3', '2 3', '9 3 2 3')  # of the first eight runs, the second eight …
_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 44, 50


def stroke(number: int) -> tuple[str, str]:
  """Returns the color of a run's curve and its dashes, which differ for the first 32 runs."""
  return COLORS[number % len(COLORS)], _DASHES[number // len(COLORS) % len(_DASHES)]


def svg(title: str, x_label: str, series: Mapping[str, Points]) -> str:
  """Returns a picture of curves with a legend, for light backgrounds.

  Args:
    title: What the vertical axis shows.
    x_label: What the horizontal axis shows.
    series: Points by name.
  """
  drawn = {name: points for name, points in series.items() if points}
  xs = [x for points in drawn.values() for x, _ in points] or [0.0, 1.0]
  ys = [y for points in drawn.values() for _, y in points] or [0.0, 1.0]
  x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
  right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

  def place(value: float, marks: Sequence[float], begin: float, end: float) -> float:
    low, high = marks[0], marks[-1]
    return begin + (value - low) / ((high - low) or 1) * (end - begin)

  at = lambda x, y: (place(x, x_ticks, _LEFT, right), place(y, y_ticks, bottom, _TOP))
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
    'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
    f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    f'<text x="{_LEFT}" y="22" font-size="16" font-weight="600">{html.escape(title)}</text>',
    f'<text x="{right}" y="{_HEIGHT - 10}" text-anchor="end">{html.escape(x_label)}</text>',
  ]
  for mark in y_ticks:
    _, y = at(x_ticks[0], mark)
    parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
    parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(mark)}</text>')
  for mark in x_ticks:
    x, _ = at(mark, y_ticks[0])
    parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{short(mark)}</text>')
  for number, (name, points) in enumerate(drawn.items()):
    path = ' '.join('{:.1f},{:.1f}'.format(*at(*point)) for point in points)
    color, dashes = stroke(number)
    style = f'fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dashes}"'
    parts.append(f'<polyline points="{path}" {style}/>')
    if len(points) == 1:  # no line shows one point
      x, y = at(*points[0])
      parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    y = _TOP + 16 + 17 * number
    parts.append(f'<path d="M{right - 30} {y - 4}h30" {style}/>')
    parts.append(
      f'<text x="{right - 36}" y="{y}" text-anchor="end" fill="{color}">{html.escape(name)}</text>'
    )
  if not drawn:
    parts.append(f'<text x="{_LEFT + 20}" y="{_TOP + 30}">No numbers yet.</text>')
  return '\n'.join([*parts, '</svg>']) + '\n'


def sheet(pictures: Sequence[str]) -> str:
  """Returns one picture with several pictures of `svg` below each other."""
  if len(pictures) == 1:
    return pictures[0]
  place = lambda i: f'<svg y="{i * _HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
  inner = (text.replace('<svg ', place(i), 1) for i, text in enumerate(pictures))
  size = f'viewBox="0 0 {_WIDTH} {_HEIGHT * len(pictures)}"'
  return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"".join(inner)}</svg>\n'


def ticks(low: float, high: float) -> list[float]:
  """Returns four to eight round numbers; the first and the last enclose the interval."""
  if low == high:
    low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
  rough = (high - low) / 5
  unit = 10 ** math.floor(math.log10(rough))
  step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
  first = math.floor(low / step)
  return [step * n for n in range(first, math.ceil(high / step) + 1)]


def short(number: float) -> str:
  """Returns a number in few characters: 1.5k, 2M, 0.0003."""
  for limit, letter in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if abs(number) >= limit:
      return f'{number / limit:.4g}{letter}'
  return f'{number:.4g}'
