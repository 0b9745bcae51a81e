"""python benchmarks/convergence.py [--steps=300] [--seed=N] [--json=…] [--svg=…] [--only=NAME,…]

Trains DemoGPTAdam on its text with each backend in bfloat16, with the same data and seed, and
compares the losses. If Transformer Engine is not installed, its Python code computes on the CPU
(tests/support/te_cpu.py). This gives its numbers, but does not use its kernels. --only names
entries of BACKENDS, or of STORAGE, which keeps moments and gradients in bfloat16.
"""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]

BACKENDS = {
  'bf16': [],
  'FP8': ['USE_FP8=True'],
  'TE FP8 delayed': ['USE_TE=gemm', 'TE_RECIPE=DelayedScaling'],
  'TE FP8 current': ['USE_TE=gemm', 'TE_RECIPE=Float8CurrentScaling'],
  'int8 forward': ['USE_INT8=forward'],
  'int8': ['USE_INT8=forward_backward'],
}
STORAGE = {
  'moments': ['ADAM_MOMENTS_DTYPE=bfloat16'],
  'moments and gradients': ['ADAM_MOMENTS_DTYPE=bfloat16', 'GRADIENT_DTYPE=bfloat16'],
}
COLORS = ('#000000', '#1f77b4', '#2ca02c', '#98df8a', '#ff7f0e', '#d62728')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--seed', type=int, default=1234)
  parser.add_argument('--json', type=pathlib.Path, help='where the losses go, a line a backend')
  parser.add_argument('--svg', type=pathlib.Path, help='where the plot goes')
  parser.add_argument('--only', default=','.join(BACKENDS), help='names')
  args = parser.parse_args()
  flags = BACKENDS | STORAGE
  seed = f'SEED={args.seed}'
  results = {name: losses([*flags[name], seed], args.steps) for name in args.only.split(',')}
  print(table(results))
  if args.json is not None:
    lines = (json.dumps({'backend': k, 'steps': args.steps} | v) for k, v in results.items())
    args.json.write_text('\n'.join(lines) + '\n')
  if args.svg is not None:
    args.svg.write_text(svg({name: r['train'] for name, r in results.items()}))


def losses(flags: list[str], steps: int) -> dict:
  """Returns {'train': [[step, loss] …], 'held_out': loss} of one run."""
  has_te = importlib.util.find_spec('transformer_engine_jax') is not None
  module = 'paxlite.main' if has_te or flags[:1] != ['USE_TE=gemm'] else 'tests.support.te_main'
  values = [f'MAX_STEPS={steps}', f'LR_COS_DECAY_END={steps}', 'FPROP_DTYPE=bfloat16']
  values += [f'EVAL_INTERVAL_STEPS={steps}', 'SUMMARY_INTERVAL_STEPS=10', 'SAMPLE_PROMPT=None']
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [
        sys.executable,
        '-m',
        module,
        '--fdl_config=DemoGPTAdam',
        f'--job_log_dir={folder}',
        '--enable_checkpoint_saving=False',
        *(f'--fdl.{v}' for v in values + flags),
      ],
      cwd=ROOT,
      check=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    read = lambda name: [json.loads(line) for line in (pathlib.Path(folder) / name).open()]
    train = [[r['step'], round(r['loss'], 5)] for r in read('metrics.jsonl')]
    return {'train': train, 'held_out': read('eval_metrics.jsonl')[-1]['avg_xent']}


def table(results: dict) -> str:
  """Returns a Markdown table: mean loss of the last tenth of the steps, and of held-out text."""
  last = {}
  for name, r in results.items():
    tail = [loss for _, loss in r['train']][-max(len(r['train']) // 10, 1) :]
    last[name] = (sum(tail) / len(tail), r['held_out'])
  first = next(iter(last.values()))
  lines = ['| backend | loss, last tenth | to the first | held out | to the first |']
  lines.append('|---|---|---|---|---|')
  for name, values in last.items():
    pairs = zip(values, first, strict=True)
    cells = (f'{v:.4f} | {v / f - 1:+.2%}' for v, f in pairs)
    lines.append(f'| {name} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def svg(curves: dict, width: int = 640, height: int = 360, legend: int = 24) -> str:
  """Returns a plot of loss by step, with one line per backend, whose names begin at `legend`."""
  points = [p for curve in curves.values() for p in curve]
  last, low, high = max(p[0] for p in points), min(p[1] for p in points), max(p[1] for p in points)
  x = lambda step: 40 + (width - 60) * step / last
  y = lambda loss: 10 + (height - 40) * (high - loss) / (high - low)
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11" '
    'font-family="sans-serif">',
    f'<rect width="{width}" height="{height}" fill="white"/>',
  ]
  for i in range(5):
    loss = low + (high - low) * i / 4
    parts.append(f'<text x="4" y="{y(loss) + 4:.0f}">{loss:.2f}</text>')
    step = last * i // 4
    parts.append(f'<text x="{x(step) - 8:.0f}" y="{height - 8}">{step}</text>')
  for i, ((name, curve), color) in enumerate(zip(curves.items(), COLORS, strict=False)):
    line = ' '.join(f'{x(s):.1f},{y(v):.1f}' for s, v in curve)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
    parts.append(f'<text x="{width - 150}" y="{legend + 16 * i}" fill="{color}">{name}</text>')
  return '\n'.join([*parts, '</svg>', ''])


if __name__ == '__main__':
  main()
