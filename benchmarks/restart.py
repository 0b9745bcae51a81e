"""python -m benchmarks.restart [--folder=runs/restart] [--svg=docs/restart.svg] [--csv=…]

Trains DemoGPTAdam, kills it with SIGKILL after --kill_at steps, runs the same command again to the
end, and draws the losses of both starts. The steps since the last checkpoint are computed twice:
the command says whether their losses are equal, and fails where they are not.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import jax

KILLED, CONTINUED = '#d62728', '#1f77b4'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/restart'))
  parser.add_argument('--steps', type=int, default=240)
  parser.add_argument('--checkpoint_every', type=int, default=60)
  parser.add_argument('--kill_at', type=int, default=164)
  parser.add_argument('--svg', type=pathlib.Path, help='where the picture goes')
  parser.add_argument('--csv', type=pathlib.Path, help='where step,killed,continued go')
  parser.add_argument('values', nargs='*', help='NAME=VALUE for DemoGPTAdam')
  args = parser.parse_args()
  command = [
    *(sys.executable, '-m', 'paxlite', 'train', 'DemoGPTAdam', f'--folder={args.folder}'),
    *(f'MAX_STEPS={args.steps}', f'LR_COS_DECAY_END={args.steps}', 'SUMMARY_INTERVAL_STEPS=2'),
    *(f'CHECKPOINT_EVERY_N_STEPS={args.checkpoint_every}', 'MAX_EVAL_BATCHES=8'),
    *(f'EVAL_INTERVAL_STEPS={args.steps}', *args.values),
  ]
  before = args.folder / 'killed.jsonl'  # a second call draws what the first one has measured
  if not before.exists():
    kill_at(command, args.folder / 'metrics.jsonl', args.kill_at)
    shutil.copy(args.folder / 'metrics.jsonl', before)
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

  killed, continued = losses(before), losses(args.folder / 'metrics.jsonl')
  begin = max(killed) // args.checkpoint_every * args.checkpoint_every
  twice = sorted(step for step in killed if step > begin)
  equal = [step for step in twice if killed[step] == continued[step]]
  print(
    f'killed at step {max(killed)}, continued from {begin}; of {len(twice)} losses that were '
    f'recorded twice, {len(equal)} are equal'
  )
  if args.csv is not None:
    args.csv.write_text(table(killed, {s: v for s, v in continued.items() if s > begin}))
  if args.svg is not None:
    args.svg.write_text(svg(killed, {s: v for s, v in continued.items() if s >= begin}))
  if not twice or equal != twice:
    sys.exit('the continued run is not the one that was killed')


def kill_at(command: list[str], metrics: pathlib.Path, step: int) -> None:
  """Runs the command, and kills it when it has recorded this step."""
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  while process.poll() is None:
    if metrics.exists() and max(losses(metrics), default=0) >= step:
      process.kill()
      process.wait()
      return
    time.sleep(0.2)
  sys.exit(f'the run ended with {process.returncode} before it was killed')


def losses(file: pathlib.Path) -> dict[int, float]:
  """Returns the loss by step; a line that a kill has cut off is left out."""
  lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith('\n')]
  return {record['step']: record['loss'] for record in map(json.loads, lines)}


def table(killed: dict[int, float], continued: dict[int, float]) -> str:
  rows = [f'# DemoGPTAdam, CPU, jax {jax.__version__}; python -m benchmarks.restart']
  rows.append('step,killed,continued')
  for step in sorted(killed | continued):
    rows.append(f'{step},{killed.get(step, "")},{continued.get(step, "")}')
  return '\n'.join(rows) + '\n'


def svg(killed: dict[int, float], continued: dict[int, float]) -> str:
  """Returns the picture: the killed run as a broad line, the continued one on top of it."""
  width, height = 720, 300
  whole = killed | continued
  last, low, high = max(whole), min(whole.values()), max(whole.values())
  x = lambda step: 46 + (width - 62) * step / last
  y = lambda loss: 14 + (height - 50) * (high - loss) / (high - low)
  line = lambda curve: ' '.join(f'{x(s):.1f},{y(v):.1f}' for s, v in sorted(curve.items()))
  end, begin = max(killed), min(continued)
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12" '
    'font-family="sans-serif">',
    f'<rect width="{width}" height="{height}" fill="white"/>',
    f'<rect x="{x(begin):.1f}" y="10" width="{x(end) - x(begin):.1f}" height="{height - 42}" '
    'fill="#f2f2f2"/>',
    f'<polyline points="{line(killed)}" fill="none" stroke="{KILLED}" stroke-width="5" '
    'stroke-opacity="0.45"/>',
    f'<polyline points="{line(continued)}" fill="none" stroke="{CONTINUED}" stroke-width="1.5"/>',
    f'<path d="M{x(end):.1f} 10V{height - 32}" stroke="{KILLED}" stroke-dasharray="4 3"/>',
    f'<text x="{x(end) + 6:.1f}" y="26" fill="{KILLED}">kill -9 at step {end}</text>',
    f'<text x="{x(end) + 6:.1f}" y="44" fill="{CONTINUED}">the same command again,</text>',
    f'<text x="{x(end) + 6:.1f}" y="60" fill="{CONTINUED}">from the checkpoint of {begin}</text>',
  ]
  for i in range(5):
    loss, step = low + (high - low) * i / 4, last * i // 4
    parts.append(f'<text x="8" y="{y(loss) + 4:.0f}">{loss:.2f}</text>')
    parts.append(f'<text x="{x(step) - 10:.0f}" y="{height - 16}">{step}</text>')
  parts.append(f'<text x="{width // 2 - 30}" y="{height - 2}">step</text>')
  return '\n'.join([*parts, '</svg>', ''])


if __name__ == '__main__':
  main()
