"""python -m benchmarks.nanochat FOLDER RUNS [--python=PYTHON] [--depth=4] [--steps=750]

nanochat, which is unpacked in FOLDER, and paxlite train on the same documents, with matrices of the
same sizes, on as many tokens, each with several scales of its learning rates. The table has bits
per byte of the same held-out documents after each third of the steps, and the median seconds of a
step. PYTHON has what nanochat imports but wandb, which this does not use: torch, tiktoken, rustbpe,
pyarrow, kernels, psutil, filelock and requests. What RUNS has already is not repeated.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from benchmarks.nanochat import documents

VOCAB_SIZE, LENGTH, ROWS, HEAD = 8192, 256, 4, 64
RATES = {'embedding-lr': 0.3, 'unembedding-lr': 0.008, 'matrix-lr': 0.02, 'scalar-lr': 0.5}
WEIGHT_DECAY = 0.28  # like RATES, nanochat's own
RATE = 5e-3  # of MuonRecipe
TIMED_STEPS = 50
TIMED_ROUNDS = 3

Result = dict[str, Any]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('nanochat', type=pathlib.Path, help='the folder with nanochat/ and scripts/')
  parser.add_argument('runs', type=pathlib.Path, help='a folder for documents, runs and results')
  parser.add_argument('--python', default=sys.executable, help='runs nanochat')
  parser.add_argument('--sides', nargs='*', default=list(SIDES), choices=SIDES)
  parser.add_argument('--depth', type=int, default=4)
  parser.add_argument('--width', type=int, help='64 times the depth, unless it is given')
  parser.add_argument('--steps', type=int, default=750)
  parser.add_argument('--scales', nargs='*', type=float, default=[0.5, 1, 1.5, 2])
  parser.add_argument('--their_scales', nargs='*', type=float, default=[5, 10, 20, 40])
  parser.add_argument('--seeds', nargs='*', type=int, default=[0])
  parser.add_argument('--vocab', type=int, default=VOCAB_SIZE, help='token ids; each has its RUNS')
  parser.add_argument('--evaluations', type=int, default=3, help='of each run')
  parser.add_argument('--experiment', default='benchmarks.nanochat.experiment.Beside')
  parser.add_argument('--values', nargs='*', default=[], help='attributes of it, NAME=VALUE')
  parser.add_argument('--time_only', action='store_true', help='50 steps of each side, three times')
  parser.add_argument('--json', type=pathlib.Path, help='a file for all results of RUNS')
  args = parser.parse_args()
  args.nanochat, args.runs = args.nanochat.resolve(), args.runs.resolve()
  args.width = args.width or HEAD * args.depth
  documents.write(args.runs, args.seeds, args.vocab, LENGTH)
  done = args.runs / ('times.jsonl' if args.time_only else 'results.jsonl')
  for key in timed(args) if args.time_only else planned(args):
    if any(key.items() <= result.items() for result in results(done)):
      continue
    result = key | SIDES[key['side']](args, key)
    with done.open('a') as f:
      f.write(json.dumps(result) + '\n')
    print(json.dumps(result), flush=True)
  found = results(done)
  print(table(found))
  if args.json:
    args.json.write_text(''.join(json.dumps(result) + '\n' for result in found))


def planned(args: argparse.Namespace) -> Iterator[Result]:
  """Yields what identifies each run, the sides in turn."""
  scales = {'nanochat': args.their_scales, 'paxlite': args.scales}
  for seed in args.seeds:
    for number in range(max(map(len, scales.values()))):
      for side in args.sides:
        if number < len(scales[side]):
          yield run_of(args, side, args.steps, scales[side][number], seed)


def timed(args: argparse.Namespace) -> Iterator[Result]:
  for number in range(TIMED_ROUNDS):
    for side in args.sides:
      yield run_of(args, side, TIMED_STEPS, 1, args.seeds[0]) | {'round': number}


def run_of(args: argparse.Namespace, side: str, steps: int, scale: float, seed: int) -> Result:
  sizes = dict(depth=args.depth, width=args.width, steps=steps)
  own = dict(experiment=args.experiment, values=args.values) if side == 'paxlite' else {}
  return dict(side=side, **sizes, scale=scale, seed=seed, **own)


def results(path: pathlib.Path) -> list[Result]:
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_nanochat(args: argparse.Namespace, key: Result) -> Result:
  """Trains nanochat; its evaluations are those of evaluate.py, of checkpoints."""
  base, steps, scale = args.runs / f'nanochat_{key["seed"]}', key['steps'], key['scale']
  stand_in = base / 'stand_in'
  stand_in.mkdir(exist_ok=True)
  (stand_in / 'wandb.py').touch()
  path = os.pathsep.join(map(str, (args.nanochat, stand_in)))
  env = os.environ | {'PYTHONPATH': path, 'NANOCHAT_BASE_DIR': str(base)}

  def run(name: str, *words: str) -> str:
    log = base / f'{name}.log'
    with log.open('w') as out:
      done = subprocess.run([args.python, '-u', *words], env=env, cwd=args.nanochat, stdout=out)
    if done.returncode:
      raise SystemExit(f'nanochat failed, and {log} says why')
    return log.read_text()

  if not (base / 'tokenizer' / 'token_bytes.pt').exists():
    run('tokenizer', '-m', 'scripts.tok_train', f'--vocab-size={args.vocab}')
  name = f'd{key["depth"]}_w{key["width"]}_n{steps}_x{scale:g}'
  every = -1 if 'round' in key else max(1, steps // args.evaluations)
  log = run(
    name, '-m', 'scripts.base_train', '--device-type=cpu', f'--depth={key["depth"]}',
    f'--aspect-ratio={key["width"] // key["depth"]}', f'--head-dim={HEAD}', '--window-pattern=L',
    f'--max-seq-len={LENGTH}', f'--device-batch-size={ROWS}', f'--model-tag={name}', '--run=dummy',
    f'--total-batch-size={ROWS * LENGTH}', f'--num-iterations={steps}', f'--save-every={every}',
    '--eval-every=-1', '--core-metric-every=-1', '--sample-every=-1',
    *(f'--{rate}={value * scale:g}' for rate, value in RATES.items()),
    f'--weight-decay={WEIGHT_DECAY / scale:g}',
  )  # fmt: skip
  seconds = [float(ms) / 1e3 for ms in re.findall(r'dt: ([\d.]+)ms', log)]
  found: Result = {'step_seconds': median(seconds[10:] or seconds)}
  if every > 0:
    marks = [str(step) for step in range(every, steps + 1, every)]
    script = str(pathlib.Path(__file__).with_name('evaluate.py'))
    lines = run(f'{name}_bits', script, name, *marks).splitlines()
    found['bits_per_byte'] = json.loads(lines[-1])
  shutil.rmtree(base / 'base_checkpoints' / name)
  return found


def of_paxlite(args: argparse.Namespace, key: Result) -> Result:
  name = f'{zlib.crc32(json.dumps(key).encode()):08x}'
  run, data, steps = args.runs / 'runs' / name, args.runs / 'paxlite', key['steps']
  shutil.rmtree(run, ignore_errors=True)
  every = max(1, steps // args.evaluations)
  values = {
    'DATASET_PATH': data, 'VOCAB_PATH': data / 'tokenizer.model', 'VOCAB_SIZE': args.vocab,
    'MAX_SEQ_LEN': LENGTH, 'PERCORE_BATCH_SIZE': ROWS, 'NUM_LAYERS': key['depth'],
    'MODEL_DIMS': key['width'], 'NUM_HEADS': key['width'] // HEAD, 'HIDDEN_DIMS': 4 * key['width'],
    'MAX_STEPS': steps, 'SEED': key['seed'], 'LEARNING_RATE': RATE * key['scale'],
    'CHECKPOINT_EVERY_N_STEPS': steps, 'EVAL_INTERVAL_STEPS': every,
  } | ({'MAX_EVAL_BATCHES': 1} if 'round' in key else {})  # fmt: skip
  words = [f'{attribute}={value}' for attribute, value in values.items()]
  train = [sys.executable, '-m', 'paxlite', 'train', args.experiment, f'--folder={run}']
  subprocess.run([*train, *words, *args.values], check=True, stdout=subprocess.DEVNULL)
  seconds = [
    line['step_seconds'] for line in results(run / 'metrics.jsonl') if line['step_seconds']
  ]
  found: Result = {'step_seconds': median(seconds[1:] or seconds)}
  if 'round' not in key:
    size = json.loads((data / 'held_out.json').read_text())
    bits = size['tokens'] / size['bytes'] / math.log(2)
    lines = results(run / 'eval_metrics.jsonl')
    found['bits_per_byte'] = {
      str(line['step']): line['avg_xent'] * bits
      for line in lines if line['step'] % every == 0 or line['step'] == steps
    }  # fmt: skip
  return found


SIDES = {'nanochat': of_nanochat, 'paxlite': of_paxlite}


def median(seconds: list[float]) -> float:
  return round(statistics.median(seconds), 4)


def table(found: list[Result]) -> str:
  """Returns a line for each run, the best of each size and side first."""
  lines = [
    '| | depth × width | steps | scale | seed | bits per byte | seconds a step |',
    '|---|---|---|---|---|---|---|',
  ]
  last = lambda r: [*r.get('bits_per_byte', {0: 0.0}).values()][-1]
  for r in sorted(found, key=lambda r: (r['depth'], r['steps'], r['side'], last(r))):
    bits = ', '.join(f'{value:.3f}' for value in r.get('bits_per_byte', {}).values())
    name = ' '.join([r['side'], *r.get('values', [])])
    cells = name, f'{r["depth"]} × {r["width"]}', r['steps'], r['scale'], r['seed'], bits
    lines.append(f'| {" | ".join(map(str, cells))} | {r["step_seconds"]:.3f} |')
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
