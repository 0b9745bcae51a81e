"""The output of -m benchmarks.gpu: the device, one table per kind of case, and targets."""

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.cases import KINDS, TARGETS, Target, find, kind
from benchmarks.gpu.device import Result
from benchmarks.gpu.sizes import (
  PROBE_SECONDS,
  START_BYTES,
  STATE_BYTES,
  guessed,
  guessed_seconds,
  parameters,
)


def share(value: float | None) -> str:
  return '–' if value is None else f'{value:.1%}'


def times(value: float | None) -> str:
  return '–' if value is None else f'{value:.2f}'


def milliseconds(value: float | None) -> str:
  return '–' if value is None else f'{1000 * value:.4g}'


def about(result: Result) -> Iterator[str]:
  """Yields the lines above the tables."""
  versions = {'driver': result['driver'], 'Python': result['python'], **result['versions']}
  yield ', '.join([result['device'], *(f'{k} {v}' for k, v in versions.items() if v)])
  matmul, peak = result['matmul'], result['peak_flops']
  of = f', peak {peak / 1e12:,.0f}' if peak else ', peak unknown'
  yield f'{matmul["size"]}³ {matmul["dtype"]} product: {matmul["flops"] / 1e12:,.2f} TFLOP/s{of}'
  copy, peak = result['copy'], result['peak_bandwidth']
  of = f', data sheet {peak / 1e9:,.0f}' if peak else ', data sheet unknown'
  size = f'{copy["bytes"] / 2**20:,.0f} MiB'
  yield f'copying {size}: {copy["bandwidth"] / 1e9:,.0f} GB/s read and written{of}'
  if result['memory']:
    yield f'memory for JAX: {result["memory"] / 2**30:.3g} GiB'
  for module, reason in result['missing'].items():
    yield f'without {module}: {textwrap.shorten(reason, 150)}'


def line(name: str, case: Result, seconds: float) -> str:
  """Returns a short line about a case, for printing when it is done."""
  if case['status'] != 'ok':
    return f'{seconds:4.0f} s  {name}: {told(case)}'
  if kind(name) == 'start':
    starts = f'{case["first_seconds"]:.1f} s, second start {case["second_seconds"]:.1f} s'
    return f'{seconds:4.0f} s  {name}: {starts}'
  words = [
    f'{milliseconds(case["median_seconds"])} ms',
    f'{case["tokens_per_second"]:,.0f} tokens/s',
  ]
  words += [f'MFU {share(case["mfu"])}'] if case.get('mfu') else []
  words += [f'{share(case["share_of_copy"])} of a copy'] if case.get('share_of_copy') else []
  words += [f'ratio {times(case["ratio"])}'] if case.get('ratio') else []
  return f'{seconds:4.0f} s  {name}: {", ".join(words)}'


def told(case: Result) -> str:
  return f'{case["status"]}: {textwrap.shorten(case["reason"], 150)}'


def layers(case: Result) -> str:
  return f'{case["layers"]}' + (f', {case["experts"]} experts' if case.get('experts') else '')


def batch(case: Result) -> str:
  rows, length = case['batch']
  return f'{rows} × {length}'


def quartiles(case: Result) -> str:
  return ' to '.join(map(milliseconds, case['quartile_seconds']))


def peak_memory(case: Result) -> str:
  return f'{(case["peak_bytes"] or case.get("compiled_bytes", 0)) / 2**30:.3g}'


def program(case: Result) -> str:
  notes = [f'{k} {n}' for k, n in case['program'].items()]
  if case['skipped_steps']:
    notes.append(f'{case["skipped_steps"]} steps skipped')
  return ', '.join(notes) or '–'


def against_reference(case: Result) -> str:
  found = case.get('loss_differences')
  return f'{found[-1]:.1e}' if found else '–'


# The columns of each kind's table: a name, and a function of the case.
_STEP = [
  ('layers', layers),
  ('batch', batch),
  ('step ms', lambda case: milliseconds(case['median_seconds'])),
  ('quartiles', quartiles),
  ('queued ms', lambda case: milliseconds(case['queued_seconds'])),
  ('tokens/s', lambda case: f'{case["tokens_per_second"]:,.0f}'),
  ('TFLOP/s', lambda case: f'{case["model_flops"] / 1e12:.3g}'),
  ('MFU', lambda case: share(case.get('mfu'))),
  ('of matmul', lambda case: share(case.get('share_of_matmul'))),
  ('ratio', lambda case: times(case.get('ratio'))),
  ('compiled s', lambda case: f'{case["compile_seconds"]:.0f}'),
  ('peak GiB', peak_memory),
  ('last loss', lambda case: f'{case["losses"][-1]:.4f}'),
]
COLUMNS: dict[str, list[tuple[str, Callable[[Result], Any]]]] = {
  'train': [*_STEP, ('against reference', against_reference), ('in the program', program)],
  'decode': [
    ('layers', layers),
    ('rows × prompt', batch),
    ('token ms', lambda case: milliseconds(case['median_seconds'])),
    ('quartiles', quartiles),
    ('tokens/s', lambda case: f'{case["tokens_per_second"]:,.0f}'),
    ('weights GB', lambda case: f'{case["weight_bytes"] / 1e9:.3g}'),
    ('cache GB', lambda case: f'{case["cache_bytes"] / 1e9:.3g}'),
    ('weights GB/s', lambda case: f'{case["bandwidth"] / 1e9:,.0f}'),
    ('of a copy', lambda case: share(case.get('share_of_copy'))),
    ('of data sheet', lambda case: share(case.get('share_of_bandwidth'))),
    ('prompt ms', lambda case: milliseconds(case['prompt_seconds'])),
    ('compiled s', lambda case: f'{case["compile_seconds"]:.0f}'),
    ('peak GiB', peak_memory),
  ],
  'torch': _STEP,
  'start': [
    ('layers', layers),
    ('rows × tokens', batch),
    ('first start s', lambda case: f'{case["first_seconds"]:.1f}'),
    ('second start s', lambda case: f'{case["second_seconds"]:.1f}'),
  ],
}


def row(name: str, case: Result) -> str:
  """Returns a case as a line of its kind's table."""
  if case['status'] != 'ok':
    return f'| {name} | {told(case)} |'
  cells = [name, *(cell(case) for _, cell in COLUMNS[kind(name)])]
  return f'| {" | ".join(map(str, cells))} |'


def tables(result: Result) -> Iterator[str]:
  """Yields a table for each kind that has cases, and the targets."""
  for one in KINDS:
    cases = {n: case for n, case in result['cases'].items() if kind(n) == one}
    if cases:
      header = ['case', *(name for name, _ in COLUMNS[one])]
      yield f'\n{one}\n\n| {" | ".join(header)} |\n|{"---|" * len(header)}'
      yield from (row(n, case) for n, case in cases.items())
  judged = [t for t in TARGETS if set(t.cases) & result['cases'].keys()]
  if judged:
    yield '\ntargets\n'
    if result['tiny']:
      yield 'They are of the full sizes; these sizes are tiny.\n'
    header = ['work', 'target', 'measured', '', 'of matmul', 'case']
    yield f'| {" | ".join(header)} |\n|{"---|" * len(header)}'
    yield from (target_row(t, result) for t in judged)


def judge(target: Target, result: Result) -> tuple[str, str, float | None]:
  """Returns the verdict on a target, the best case for it, and the value measured there."""
  cases = {n: result['cases'][n] for n in target.cases if n in result['cases']}
  found = {
    n: case[target.quantity]
    for n, case in cases.items()
    if case['status'] == 'ok' and case.get(target.quantity) is not None
  }
  if not found:
    name, case = next(iter(cases.items()))
    verdict = 'not measured' if case['status'] == 'ok' else f'not measured: {case["status"]}'
    return verdict, name, None
  sign = -1 if target.at_most else 1
  name = max(found, key=lambda n: sign * found[n])
  if target.bound is None:
    return 'no target', name, found[name]
  is_met = sign * found[name] >= sign * target.bound
  return 'met' if is_met else 'NOT met', name, found[name]


def target_row(target: Target, result: Result) -> str:
  verdict, name, measured = judge(target, result)
  word = {
    'tokens_per_second': lambda x: f'{x:,.0f} tokens/s',
    'model_flops': lambda x: f'{x / 1e12:,.0f} TFLOP/s',
    'ratio': lambda x: f'{x:.2f} ×',
    'inverse_ratio': lambda x: f'{x:.2f} ×',
    'second_seconds': lambda x: f'{x:.1f} s',
    'largest_difference': lambda x: f'{x:.1e}',
  }.get(target.quantity, lambda x: f'{x:.1%}')
  sign = '≤' if target.at_most else '≥'
  bound = '–' if target.bound is None else f'{sign} {word(target.bound)}'
  what = '–' if measured is None else word(measured)
  of_matmul = share(result['cases'][name].get('share_of_matmul'))
  return f'| {target.work} | {bound} | {what} | {verdict} | {of_matmul} | {name} |'


def dry_run(suites: dict[str, list[str]], tiny: bool, memory: float) -> Iterator[str]:
  """Yields the cases of suites with their sizes and estimates of memory and time, without a device.

  Args:
    suites: Names of cases by suite.
    tiny: See --tiny.
    memory: Bytes that JAX may use.
  """
  for suite, names in suites.items():
    yield (
      f'\n{suite}\n{"case":36} {"layers":>12} {"parameters":>14} {"state GiB":>9} {"batch":>10} '
      f'{"about s":>7}  what'
    )
    probes = {'device'} | {m for name in names if (m := find(name)[1].needs)}
    total = float(PROBE_SECONDS * len(probes))
    for name in names:
      e = guessed(name, tiny, memory)
      seconds = guessed_seconds(name, e)
      total += seconds
      yield dry_row(name, e, seconds)
    yield f'{"with what is asked before: " + ", ".join(sorted(probes)):85} {total:7.0f}'
  yield (
    f'\nstate: {STATE_BYTES} bytes a parameter in training, activations not counted; of a fitted '
    f'model about what {memory / 2**30:.3g} GiB for JAX hold: the compiler decides on the device'
  )


def dry_row(name: str, e: Any, seconds: float) -> str:
  model, variant = find(name)
  count = parameters(e)
  is_decode = kind(name) == 'decode'
  number = {
    'NUM_EXPERTS': f'{e.NUM_LAYERS}, {getattr(e, "NUM_EXPERTS", 0)} exp.',
    'NUM_LAYERS': f'about {e.NUM_LAYERS}',
  }.get(model.fitted or '', f'{e.NUM_LAYERS}')
  rows = e.DECODE_BATCH_SIZE if is_decode else e.batch_size
  shape = f'{rows} × 1' if is_decode else f'{rows} × {e.MAX_SEQ_LEN}'
  needs = [f'needs {variant.needs}'] if variant.needs else []
  needs += [f'compute capability {variant.capability:g}'] if variant.capability else []
  needs += [f'{variant.devices} devices'] if variant.devices > 1 else []
  what = ', '.join([kind(name) if kind(name) != 'train' else str(e.backend), *needs])
  state = {'decode': 2, 'start': START_BYTES}.get(kind(name), STATE_BYTES) * count / 2**30
  return f'{name:36} {number:>12} {count:>14,} {state:9.3g} {shape:>10} {seconds:7.0f}  {what}'
