"""python -m tests.support.fuzz: gives readers random input; fails if one reads it wrongly.

Prints for each target of tests/support/fuzzing.py: cases, right results, clear errors, seconds. The
smallest case that violates its property is printed with the exception that it raised.
"""

import argparse
import logging
import sys
import time
import traceback
import warnings

from tests.support import fuzzing


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--cases', type=int, default=10_000, help='of each target')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--targets', nargs='*', choices=fuzzing.TARGETS, default=fuzzing.TARGETS)
  args = parser.parse_args()
  logging.disable()  # hides warnings about skipped lines
  warnings.simplefilter('ignore')  # hides warnings of packages
  code = 0
  print(f'target, cases, right results, clear errors, seconds; seed {args.seed}')
  for target in args.targets:
    started = time.perf_counter()
    try:
      right, refused = fuzzing.run(target, args.cases, args.seed)
    except Exception:  # any exception is a finding
      traceback.print_exc(limit=-8)
      print(f'{target:12} violated', flush=True)
      code = 1
    else:
      seconds = time.perf_counter() - started
      print(f'{target:12}{right + refused:7}{right:7}{refused:7}{seconds:8.1f}', flush=True)
  return code


if __name__ == '__main__':
  sys.exit(main())
