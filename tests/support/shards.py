"""Parts of the exhaustive tests, about equally long: `make test-exhaustive SHARD=i/n`.

The tests are in the order of their files, so that a part is about few subjects, and cut where the
measured seconds say. `python -m tests.support.shards RESULTS.xml …` reads the seconds from files
of pytest's --junitxml, forgets tests that are gone, and writes the table of CONTRIBUTING.md.
"""

import collections
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

import pytest

SECONDS = pathlib.Path(__file__).parent / 'exhaustive_seconds.json'
PAGE = pathlib.Path(__file__).parents[2] / 'CONTRIBUTING.md'
TABLE = re.compile(r'(?<=<!-- shards -->\n).*?(?=<!-- end -->)', re.DOTALL)
PARTS = 12
_UNKNOWN = 5.0  # seconds of a case of a test that was never measured


def parsed(text: str) -> tuple[int, int]:
  """Returns (part, parts) of I/N; raises pytest.UsageError for another text."""
  found = re.fullmatch(r'(\d+)/(\d+)', text)
  if found is None or not 1 <= int(found[1]) <= int(found[2]):
    raise pytest.UsageError(f'--shard={text}: give I/N with 1 ≤ I ≤ N, such as 3/{PARTS}')
  return int(found[1]), int(found[2])


def chosen(items: Sequence[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
  """Returns the items of one part: those whose middle is in it if all run one after another."""
  cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
  for item in items:
    cases[item.nodeid.partition('[')[0]].append(item)
  known = measured()
  seconds = {name: known.get(name, _UNKNOWN * len(found)) for name, found in cases.items()}
  spans, ours = spans_of(seconds, parts), set()
  for name, found in cases.items():
    first, last = spans[name]
    for i, item in enumerate(found):
      middle = first + (last - first) * (i + 0.5) / len(found)
      if min(int(middle), parts - 1) == part - 1:
        ours.add(item)
  return [item for item in items if item in ours]


def measured() -> dict[str, float]:
  """Returns the seconds of test functions with all their cases, on two cores."""
  return json.loads(SECONDS.read_text())


def spans_of(seconds: Mapping[str, float], parts: int) -> dict[str, tuple[float, float]]:
  """Returns where each function begins and ends, in parts, if all run in the order of names."""
  whole, before, found = sum(seconds.values()) or 1.0, 0.0, {}
  for name in sorted(seconds):
    after = before + seconds[name]
    found[name] = parts * before / whole, parts * after / whole
    before = after
  return found


def table() -> str:
  """Returns the table of CONTRIBUTING.md: which files are in which part."""
  rows: dict[int, dict[str, None]] = collections.defaultdict(dict)
  for name, (first, last) in spans_of(measured(), PARTS).items():
    for part in range(int(first), min(PARTS, max(int(first) + 1, math.ceil(last)))):
      rows[part + 1][name.partition('::')[0]] = None
  lines = ['', '| `SHARD=` | tests of |', '|---|---|']
  lines += [f'| {part}/{PARTS} | {_short(files)} |' for part, files in sorted(rows.items())]
  return '\n'.join([*lines, '', ''])


def _short(files: Iterable[str]) -> str:
  """Returns files by their folders, as `unit/layers: moe, rotary`."""
  by_folder: dict[str, list[str]] = {}
  for file in files:
    folder, _, name = file.removeprefix('tests/').rpartition('/')
    by_folder.setdefault(folder, []).append(name.removesuffix('.py').removeprefix('test_'))
  return '; '.join(f'{folder}: {", ".join(names)}' for folder, names in by_folder.items())


def _of_results(paths: Iterable[str]) -> dict[str, float]:
  """Returns the seconds of each test function in files of pytest's --junitxml."""
  times: collections.Counter[str] = collections.Counter()
  for path in paths:
    for case in ElementTree.parse(path).iter('testcase'):
      name = f'{case.get("classname", "").replace(".", "/")}.py::{case.get("name", "")}'
      times[name.partition('[')[0]] += float(case.get('time', 0))
  return {name: round(seconds, 1) for name, seconds in times.items()}


def _is_there(name: str) -> bool:
  file, _, function = name.rpartition('::')
  path = PAGE.parent / file.partition('::')[0]
  return path.exists() and f'def {function}(' in path.read_text()


if __name__ == '__main__':
  known = {k: v for k, v in (measured() | _of_results(sys.argv[1:])).items() if _is_there(k)}
  SECONDS.write_text(json.dumps(known, indent=0, sort_keys=True) + '\n')
  PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
