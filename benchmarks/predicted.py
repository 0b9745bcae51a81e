"""python -m benchmarks.predicted RESULTS.json [CASE …]

Compiles the steps that `python -m benchmarks.gpu` has measured for the same kind of device, which
need not be there, and prints the predicted beside the measured milliseconds. Needs the extra cuda.
"""

import argparse
import json
import pathlib
import statistics

from paxlite.aot import chips, targets

# what was measured on 2026-11-26 under another name, or with kernels that are gone
_NOW = {
  'glam126m/xla': 'glam126m/xla_no_flash',  # its attention was in plain XLA
  'glam126m_dense/xla': 'glam126m_dense/xla_no_flash',
  'gpt5b_wide/xla_fp8': None,
  'gpt5b_wide/xla_fp8_no_kernels': 'gpt5b_wide/xla_fp8',
  'llama7b_dots/xla': None,
  'llama7b_dots/xla (again)': 'llama7b_dots/xla',
  'llama7b_dots/xla_packed': 'llama7b_dots/xla_packed_bias',
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n', 1)[1])
  parser.add_argument('results', type=pathlib.Path)
  parser.add_argument(
    'cases', nargs='*', metavar='CASE', help='such as gpt126m_b16/xla; all if none'
  )
  args = parser.parse_args()

  measured = json.loads(args.results.read_text())
  chip = chips.chip_of_kind(measured['device'])
  assert chip is not None, measured['device']
  targets.prepare_environment()
  errors = []
  found = {_NOW.get(c, c): found for c, found in measured['cases'].items()}
  for case in args.cases or [c for c in found if c and _is_step(c, found[c])]:
    row = _compared(case, found[case], targets.one_of(chip))
    errors.append(abs(row['predicted_ms'] / row['measured_ms'] - 1))
    print(json.dumps(row), flush=True)
  print(json.dumps({'median_error': round(statistics.median(errors), 3), 'steps': len(errors)}))


def _is_step(case: str, found: dict[str, float]) -> bool:
  return case.partition('/')[2].startswith('xla') and 'queued_seconds' in found


def _compared(case: str, found: dict[str, float], target: str) -> dict[str, object]:
  from benchmarks.gpu.cases import find
  from benchmarks.gpu.sizes import experiment
  from paxlite.aot import schedule
  from paxlite.aot.analysis import compile_step

  e = experiment(case, tiny=False, **found.get('fitted', {}))
  report = compile_step(e.replaced(PACKED_INPUT=find(case)[1].texts > 0), targets.parse(target))
  line = report.costs.roofline
  return {
    'case': case,
    'predicted_ms': round(1e3 * line.step, 1),
    'measured_ms': round(1e3 * found['queued_seconds'], 1),
    'matmul_and_attention_ms': round(1e3 * line.parts[schedule.COMPUTE], 1),
    'other_kernels_ms': round(1e3 * line.parts[schedule.MEMORY], 1),
    'kernels': report.costs.kernels,
    'jax': report.versions['jax'],
  }


if __name__ == '__main__':
  main()
