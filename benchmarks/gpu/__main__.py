"""python -m benchmarks.gpu [--suite=all] [--cases='gpt126m/*'] [--minutes=9] [--json]

Trains, decodes and starts models on one GPU, in one process per case, which imports its libraries
while the case before it is measured. Prints a line after each case, and at the end one table per
kind of case and the targets with the measured values. Cases that are not installed, fail, or exceed
--minutes are reported, and the others still run. --suite=two trains on two GPUs of one host, and
compares the losses with those of one. --dry_run lists the cases. --tiny runs the same code with
small sizes, also on CPUs. --report prints the tables of a JSON file again.
"""

import argparse
import fnmatch
import json
import pathlib
import re
import signal
import sys
import time

from benchmarks.gpu.cases import SUITES, Values, find, kind, reference_name
from benchmarks.gpu.device import TINY_MEMORY, Result, calibration
from benchmarks.gpu.report import about, dry_run, line, tables
from benchmarks.gpu.sizes import MEMORY_FRACTION, torch_sizes
from benchmarks.gpu.worker import Queue, Worker, serve

BENCHMARKS = pathlib.Path(__file__).parents[1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--suite', choices=SUITES, help='all; with --cases, those of any suite')
  parser.add_argument('--cases', default='', help='patterns of cases, with commas between')
  parser.add_argument('--minutes', type=float, default=9.0)
  parser.add_argument('--case_minutes', type=float, default=3.0, help='the most for one case')
  parser.add_argument(
    '--json', nargs='?', const='', metavar='FILE', help='benchmarks/results/gpu_DEVICE_SUITE.json'
  )
  parser.add_argument('--calibration', metavar='FILE', help='the speeds, for paxlite plan')
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument(
    '--dry_run', nargs='?', const=80.0, type=float, metavar='GIB', help='of the GPU; 80'
  )
  parser.add_argument('--report', metavar='FILE', help='prints the tables of such a JSON file')
  parser.add_argument('--serve', metavar='NAME', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    serve(args.serve)
    return
  if args.report:
    print('\n'.join(tables(json.loads(pathlib.Path(args.report).read_text()))))
    return
  suites = chosen(args.suite, args.cases, args.dry_run is not None)
  if not suites:
    known = ', '.join(n for names in chosen(args.suite, '*', False).values() for n in names)
    parser.error(f'--cases={args.cases}: none of {known}')
  if args.dry_run is not None:
    memory = TINY_MEMORY if args.tiny else MEMORY_FRACTION * args.dry_run * 2**30
    print('\n'.join(dry_run(suites, args.tiny, memory)))
    return
  ((suite, names),) = suites.items()
  run(suite, names, args)


def chosen(suite: str | None, patterns: str, every: bool) -> dict[str, list[str]]:
  """Returns the names of cases by suite.

  Args:
    suite: The name of a suite. None: 'all', or with patterns all matching cases as suite 'cases'.
    patterns: Patterns of case names; '' matches all.
    every: Whether None means every suite separately.
  """
  if suite:
    found = {suite: SUITES[suite]}
  elif every:
    found = SUITES
  elif patterns:
    found = {'cases': list(dict.fromkeys(n for names in SUITES.values() for n in names))}
  else:
    found = {'all': SUITES['all']}
  fits = lambda name: any(fnmatch.fnmatch(name, p) for p in (patterns or '*').split(','))
  return {s: kept for s, names in found.items() if (kept := [n for n in names if fits(n)])}


def run(suite: str, names: list[str], args: argparse.Namespace) -> None:
  """Runs the cases, and writes the results after each one, because the next may never end."""
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
  start = time.monotonic()
  deadline, limit = start + 60 * args.minutes, 60 * args.case_minutes
  probe = lambda name: ask(Worker(name), {'tiny': args.tiny}, deadline, limit)
  device = probe('device')
  if device.pop('status') != 'ok':
    raise SystemExit(f'no device: {device["reason"]}')
  if args.calibration:
    speeds = json.dumps(calibration(device), indent=1)
    pathlib.Path(args.calibration).write_text(speeds + '\n')
  result = {'suite': suite, 'date': time.strftime('%Y-%m-%d'), **device, 'cases': {}}
  modules = {module for n in names if (module := find(n)[1].needs)}
  probes = {module: probe(module) for module in sorted(modules)}
  result['missing'] = {m: r['reason'] for m, r in probes.items() if r['status'] != 'ok'}
  print('\n'.join(about(result)), end='\n\n', flush=True)
  workers = Queue(names)
  try:
    for name in names:
      before = time.monotonic()
      case = skipped(name, result)
      if case is None:
        task = {'tiny': args.tiny} | parts(name, result, args.tiny)
        case = ask(workers.next(name), task, deadline, limit)
      case['seconds'] = round(time.monotonic() - before, 1)
      result['cases'][name] = case
      compare(name, result)
      print(line(name, case, time.monotonic() - start), flush=True)
      if args.json is not None:
        write(args.json, result)
  finally:  # a user who stops the program sees the results so far
    workers.close()
    print('\n'.join(tables(result)), flush=True)


def parts(name: str, result: Result, tiny: bool) -> Values:
  """Returns the sizes that a case takes from its reference: its layers or experts."""
  of_reference = reference(name, result).get('fitted', {})
  if kind(name) == 'torch':
    return {'sizes': torch_sizes(name, tiny, of_reference) | find(name)[1].options}
  return {'most': of_reference.get(find(name)[0].fitted)}


def ask(worker: Worker, task: Values, deadline: float, limit: float) -> Result:
  """Returns a worker's result: its status is ok, or else skipped, failed or not run, with a reason.

  Args:
    worker: The process of a case or a probe.
    task: The arguments of worker.measured.
    deadline: Time at which it must be done.
    limit: Largest number of seconds.
  """
  left = deadline - time.monotonic()
  with worker:
    result = worker.answer(task, min(left, limit)) if left > 0 else {}
  if result is None:
    which = 'the time was over' if left < limit else 'the time of a case was over'
    return {'status': 'not run', 'reason': f'{which}, {min(left, limit):.0f} s after its turn came'}
  return result or {'status': 'not run', 'reason': 'the time was over'}


def reference(name: str, result: Result) -> Result:
  """Returns the result of a case's reference; empty if the reference did not run."""
  found = result['cases'].get(reference_name(name), {})
  return found if found.get('status') == 'ok' else {}


def skipped(name: str, result: Result) -> Result | None:
  """Returns a result if the device, missing packages, or an earlier case rule the case out."""
  model, variant = find(name)
  reason = result['missing'].get(variant.needs)
  capability = result['capability'] or 0.0
  if not reason and capability < variant.capability:
    reason = f'needs compute capability {variant.capability:g}, this is {capability:g}'
  if not reason and variant.devices > (here := result.get('devices', 1)):
    reason = f'needs {variant.devices} devices, here is {here}'
  if not reason and kind(name) == 'torch' and model.fitted and not reference(name, result):
    reason = f'{model.fitted} is that of {reference_name(name)}, which there is no result of'
  return {'status': 'skipped', 'reason': reason} if reason else None


def compare(name: str, result: Result) -> None:
  """Adds to a case its ratios to its reference and to the device's limits, if these are known.

  Speed is in model FLOPs; with the same layers, the ratio equals that of tokens.
  """
  case, other = result['cases'][name], reference(name, result)
  if case['status'] != 'ok' or kind(name) == 'start':
    return
  if kind(name) == 'decode':
    case['share_of_copy'] = case['bandwidth'] / result['copy']['bandwidth']
    peak = result['peak_bandwidth']
    case['share_of_bandwidth'] = peak and case['bandwidth'] / peak
    return
  peak = result['peak_flops']
  if same_device(case, result):
    of_each = case['model_flops'] / find(name)[1].devices
    case['mfu'] = peak and of_each / peak
    case['share_of_matmul'] = of_each / result['matmul']['flops']
  if other and same_device(case, other):
    case['ratio'] = case['model_flops'] / other['model_flops']
    case['inverse_ratio'] = 1 / case['ratio']
  same_model = name.partition('/')[0] == reference_name(name).partition('/')[0]
  same_steps = kind(name) == 'train' and same_model
  if other and same_steps and case['fitted'] == other['fitted']:
    pairs = zip(case['losses'], other['losses'], strict=True)
    case['loss_differences'] = [abs(a - b) / abs(b) for a, b in pairs]
    case['largest_difference'] = max(case['loss_differences'])


def same_device(one: Result, other: Result) -> bool:
  """Returns whether both ran on the GPU or both on the CPU. JAX may call the GPU gpu or cuda."""
  return (one['platform'] == 'cpu') == (other['platform'] == 'cpu')


def write(path: str, result: Result) -> None:
  device = re.sub(r'\W+', '_', result['device']).strip('_')
  default = BENCHMARKS / 'results' / f'gpu_{device}_{result["suite"]}.json'
  pathlib.Path(path or default).write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
  main()
