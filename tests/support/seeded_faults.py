"""python -m tests.support.seeded_faults [--count=60] [--seed=0] [--under PATH …]

Do the tests notice faults?

Puts small faults into the library of this folder, one at a time, chosen by the seed: another
comparison, sign, constant or condition. Runs the tests of the fault's room, prints a line, and
removes the fault. Use a clone, because files are changed during the run. Some faults change nothing
that tests could notice, so two versions of the tests should be compared with the same faults.
"""

import argparse
import ast
import pathlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.support import runs

PACKAGE = runs.ROOT / 'paxlite'
# The tests of a room, or of the files whose paths begin so, if they are not tests/unit/ROOM.
TESTS = {
  'aot/planning': ['unit/aot/planning'],
  'aot/explanation': ['unit/aot/test_explanation.py'],
  'stores/lease': ['unit/stores/test_lease.py'],
  'stores/mirror': ['unit/stores/test_mirror.py'],
  'stores/object': ['unit/stores/test_object_store.py', 'unit/data/test_stored_data.py'],
  'stores/step_copies': ['unit/stores/test_step_copies.py'],
  'stores': ['unit/stores', 'runs/test_stores.py'],
  'context_parallelism/context_choice': ['unit/context_parallelism/test_context_choice.py'],
  'pipeline': ['unit/pipeline/test_pipeline.py', 'unit/layers/test_model.py'],
  'context_parallelism': ['unit/context_parallelism/test_context_attention.py'],
  'optim/moments': ['unit/optim'],
  'local_checkpoints': ['unit/local_checkpoints'],
  **{
    f'layers/attention/{name}_attention': ['unit/context_parallelism/test_context_attention.py']
    for name in ('blockwise', 'partial', 'tiled')
  },
  'core': ['unit/core', 'runs/test_main.py'],
  'files': ['unit/files', 'runs/test_main.py'],
  'config': ['unit/config', 'runs/test_main.py'],
  'cli': ['unit/cli', 'runs/test_main.py'],
  'other_systems': ['unit/other_systems'],
  'processes': ['unit/processes', 'runs'],
  'compilation': ['unit/compilation', 'runs'],
  'parallel': ['runs/test_meshes.py', 'unit/training', 'unit/aot'],
  'layers': ['unit/layers', 'parity/test_reference.py'],
  'optim': ['parity/test_reference.py', 'unit/training'],
  'checkpointing': ['unit/checkpointing', 'runs'],
  'training': ['unit/training', 'unit/experiments', 'parity/test_reference.py', 'runs'],
  'experiments': ['unit/experiments', 'rules/test_golden.py', 'unit/layers', 'runs/test_main.py'],
  'generation': ['unit/generation', 'unit/eval'],
  'weights': ['parity', 'unit/checkpointing'],
  'contrib': ['runs/test_scripts.py', 'rules/test_golden.py', 'unit/data'],
  'main': ['runs/test_main.py'],
  'programs': ['runs', 'unit/checkpointing'],
  'tools': [
    *(f'unit/{name}' for name in ('tools', 'core', 'data', 'eval', 'generation')),
    'parity',
    'runs',
  ],
}
_COMPARISONS = {
  ast.Lt: '<=', ast.LtE: '<', ast.Gt: '>=', ast.GtE: '>', ast.Eq: '!=', ast.NotEq: '==',
  ast.Is: 'is not', ast.IsNot: 'is', ast.In: 'not in', ast.NotIn: 'in',
}  # fmt: skip
_OPERATORS = {ast.Add: '-', ast.Sub: '+', ast.Mult: '+', ast.FloorDiv: '*', ast.Div: '*'}


def changes(tree: ast.AST, source: str) -> list[tuple[ast.expr, str]]:
  """Returns expressions, each with the text that replaces it."""
  text = lambda node: f'({ast.get_source_segment(source, node)})'
  found: list[tuple[ast.expr, str]] = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
      operator = _COMPARISONS[type(node.ops[0])]
      found.append((node, f'{text(node.left)} {operator} {text(node.comparators[0])}'))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
      if not any(isinstance(x, ast.JoinedStr | ast.Constant) for x in (node.left, node.right)):
        operator = _OPERATORS[type(node.op)]
        found.append((node, f'{text(node.left)} {operator} {text(node.right)}'))
    elif isinstance(node, ast.BoolOp):
      operator = ' or ' if isinstance(node.op, ast.And) else ' and '
      found.append((node, operator.join(map(text, node.values))))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
      found.append((node, text(node.operand)))
    elif isinstance(node, ast.IfExp):
      swapped = f'{text(node.orelse)} if {text(node.test)} else {text(node.body)}'
      found.append((node, swapped))
  return [(node, f'({new})') for node, new in found]


def faults(count: int, seed: int, under: Sequence[str]) -> list[tuple[pathlib.Path, int, str]]:
  """Returns files, line numbers, and the whole source with each fault.

  Args:
    count: Number of faults.
    seed: Chooses them.
    under: Beginnings of paths below paxlite/, such as aot/planning; empty means all files.
  """
  chosen = []
  candidates = []
  for path in sorted(PACKAGE.rglob('*.py')):
    if under and not path.relative_to(PACKAGE).as_posix().startswith(tuple(under)):
      continue
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    column = lambda row, offset, lines=lines: len(lines[row].encode()[:offset].decode())
    for node, new in changes(ast.parse(source), source):
      first = starts[node.lineno - 1] + column(node.lineno - 1, node.col_offset)
      last = starts[node.end_lineno - 1] + column(node.end_lineno - 1, node.end_col_offset)
      changed = source[:first] + new.replace('\n', ' ') + source[last:]
      candidates.append((path, node.lineno, changed))
  random.Random(seed).shuffle(candidates)
  for path, line, changed in candidates:
    try:
      ast.parse(changed)
    except SyntaxError:  # for example in an f-string
      continue
    chosen.append((path, line, changed))
    if len(chosen) == count:
      break
  return chosen


def naming(place: pathlib.Path) -> list[str]:
  """Returns the test files that name a module; they run before the rest of its room's tests."""
  name = re.compile(rf'\b{place.parent.name}(\.| import \(?)([\w, ]*, )?{place.stem}\b')
  order = lambda f: (f.stem != f'test_{place.stem}', 'unit' not in f.parts, f)
  files = sorted((runs.ROOT / 'tests').rglob('test_*.py'), key=order)
  found = [f for f in files if f.stem == f'test_{place.stem}' or name.search(f.read_text())]
  return [f.relative_to(runs.ROOT).as_posix() for f in found]


def notice(path: pathlib.Path, seconds: float) -> str:
  """Returns the result of the tests of a file's room: 'caught', 'missed', or 'too slow'."""
  place = path.relative_to(PACKAGE)
  room = place.parts[0].removesuffix('.py')
  known = [begin for begin in TESTS if place.as_posix().startswith(begin)]
  folders = TESTS[max(known, key=len)] if known else [f'unit/{room}']
  tests = dict.fromkeys([*naming(place), *(f'tests/{f}' for f in folders)])
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', *tests]
  try:
    done = subprocess.run(
      command, cwd=runs.ROOT, capture_output=True, timeout=seconds, check=False, text=True
    )
  except subprocess.TimeoutExpired:
    return 'too slow'
  if done.returncode == 0:
    return 'missed'
  failed = [x for x in done.stdout.splitlines() if x.startswith(('FAILED', 'ERROR'))]
  return f'caught: {failed[0].split(" - ")[0] if failed else done.stdout[-200:]}'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--count', type=int, default=60)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--under', nargs='+', default=[], help='only files whose paths begin so')
  parser.add_argument('--first', type=int, default=0, help='leaves out those before it')
  parser.add_argument('--every', type=int, default=1, help='for several clones at once')
  parser.add_argument('--seconds', type=float, default=900)
  args = parser.parse_args()
  for i, (path, line, changed) in enumerate(faults(args.count, args.seed, args.under)):
    if i < args.first or (i - args.first) % args.every:
      continue
    source, before = path.read_text(), time.monotonic()
    path.write_text(changed)
    try:
      result = notice(path, args.seconds)
    finally:
      path.write_text(source)
    where = f'{path.relative_to(runs.ROOT)}:{line}'
    print(f'{i:3d} {where:60} {time.monotonic() - before:5.0f} s  {result}', flush=True)


if __name__ == '__main__':
  main()
