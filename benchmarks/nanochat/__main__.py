"""python -m benchmarks.nanochat FOLDER RUNS [--python=PYTHON] [--depth=4] [--steps=750]

nanochat, unpacked in FOLDER, and paxlite train on the same documents with matrices of the same sizes
for as many tokens, each with several scales of its learning rates. The table has bits per byte of
the same held-out documents after each third of the steps, and median seconds a step. PYTHON has what
nanochat imports, but wandb, which it does not use here: torch, tiktoken, rustbpe, pyarrow, kernels,
psutil, filelock and requests. What is in RUNS already is not repeated.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator

VOCAB_SIZE, LENGTH, ROWS = 8192, 256, 4
RATES = {'embedding-lr': 0.3, 'unembedding-lr': 0.008, 'matrix-lr': 0.02, 'scalar-lr': 0.5}
WEIGHT_DECAY = 0.28  # like RATES, nanochat's own
RATE = 5e-3  # of MuonRecipe
TIMED_STEPS = 50

Result = dict[str, object]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('nanochat', type=pathlib.Path, help='the folder with nanochat/ and scripts/')
  parser.add_argument('runs', type=pathlib.Path, help='a folder for documents, runs and results')
  parser.add_argument('--python', default=sys.executable, help='runs nanochat')
  parser.add_argument('--sides', nargs='*', default=['nanochat', 'paxlite'])
  parser.add_argument('--depth', type=int, default=4)
  parser.add_argument('--width', type=int, help='64 times the depth, unless it is given')
  parser.add_argument('--steps', type=int, default=750)
  parser.add_argument('--scales', nargs='*', type=float, default=[0.5, 1, 1.5, 2], help='paxlite')
  parser.add_argument('--their_scales', nargs='*', type=float, default=[2.5, 5, 10, 20])
  parser.add_argument('--seeds', nargs='*', type=int, default=[0])
  parser.add_argument('--time_only', action='store_true', help='50 steps of each, three times')
  parser.add_argument('--json', type=pathlib.Path, help='a file for all results')
  parser.add_argument('values', nargs='*', help='attributes of paxlite, NAME=VALUE')
  args = parser.parse_intermixed_args()
  args.nanochat, args.runs = args.nanochat.resolve(), args.runs.resolve()
  args.width = args.width or 64 * args.depth
  write_documents(args.runs, args.seeds)
  if args.time_only:
    found = list(timed(args))
  else:
    done = args.runs / 'results.jsonl'
    for seed, side, scale in orders(args):
      key = dict(
        side=side, depth=args.depth, width=args.width, steps=args.steps, scale=scale, seed=seed
      ) | ({'values': args.values} if side == 'paxlite' else {})
      if not any(key.items() <= result.items() for result in results(done)):
        result = key | SIDES[side](args, scale, seed, args.steps)
        with done.open('a') as f:
          f.write(json.dumps(result) + '\n')
        print(json.dumps(result), flush=True)
    found = results(done)
    print(table(found))
  if args.json:
    args.json.write_text('\n'.join(map(json.dumps, found)) + '\n')


def orders(args: argparse.Namespace) -> Iterator[tuple[int, str, float]]:
  """Yields (seed, side, scale), the sides in turn."""
  for seed in args.seeds:
    for ours, theirs in zip(
      args.scales + [None] * len(args.their_scales),
      args.their_scales + [None] * len(args.scales),
      strict=False,
    ):
      for side, scale in (('nanochat', theirs), ('paxlite', ours)):
        if side in args.sides and scale is not None:
          yield seed, side, scale


def write_documents(runs: pathlib.Path, seeds: list[int]) -> None:
  """Writes the documents for both sides; nanochat reads them in an order for each seed."""
  import random

  from benchmarks.nanochat import documents

  train, held_out = documents.documents()
  if not (runs / 'paxlite' / 'held_out.json').exists():
    shutil.rmtree(runs / 'paxlite', ignore_errors=True)
    documents.write_for_paxlite(runs / 'paxlite', train, held_out, VOCAB_SIZE, LENGTH)
  for seed in seeds:
    folder = runs / f'nanochat_{seed}'
    if not (folder / 'held_out.json').exists():
      shutil.rmtree(folder, ignore_errors=True)
      random.Random(seed).shuffle(ordered := list(train))
      documents.write_for_nanochat(folder, ordered, held_out)


def results(path: pathlib.Path) -> list[Result]:
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timed(args: argparse.Namespace) -> Iterator[Result]:
  """Yields the median seconds of a step, of both sides in turn."""
  for number in range(3):
    for side in args.sides:
      found = SIDES[side](args, 1.0, args.seeds[0], TIMED_STEPS, number)
      result = {'side': side, 'depth': args.depth, 'step_seconds': found['step_seconds']}
      print(json.dumps(result), flush=True)
      yield result


def of_nanochat(
  args: argparse.Namespace, scale: float, seed: int, steps: int, number: int | None = None
) -> Result:
  base = args.runs / f'nanochat_{seed}'
  (base / 'stand_in').mkdir(exist_ok=True)
  (base / 'stand_in' / 'wandb.py').touch()
  path = os.pathsep.join(map(str, (args.nanochat, base / 'stand_in')))
  env = os.environ | {'PYTHONPATH': path, 'NANOCHAT_BASE_DIR': str(base)}

  def run(*words: str) -> str:
    log = base / 'last.log'
    with log.open('w') as out:
      done = subprocess.run([args.python, '-u', *words], env=env, cwd=args.nanochat, stdout=out)
    if done.returncode:
      raise SystemExit(f'nanochat failed, and {log} says why: {" ".join(words)}')
    return log.read_text()

  if not (base / 'tokenizer' / 'token_bytes.pt').exists():
    run('-m', 'scripts.tok_train', f'--vocab-size={VOCAB_SIZE}')
  tag, every = f'd{args.depth}_w{args.width}_n{steps}_x{scale:g}', max(1, steps // 3)
  out = run(
    '-m', 'scripts.base_train', '--device-type=cpu', f'--depth={args.depth}', '--head-dim=64',
    f'--aspect-ratio={args.width // args.depth}', '--window-pattern=L', f'--max-seq-len={LENGTH}',
    f'--device-batch-size={ROWS}', f'--total-batch-size={ROWS * LENGTH}', '--eval-every=-1',
    f'--num-iterations={steps}', '--core-metric-every=-1', '--sample-every=-1', '--run=dummy',
    *(f'--{name}={value * scale:g}' for name, value in RATES.items()), f'--model-tag={tag}',
    f'--weight-decay={WEIGHT_DECAY / scale:g}', f'--save-every={-1 if number is not None else every}',
  )  # fmt: skip
  (base / f'{tag}.log').write_text(out)
  seconds = [float(ms) / 1e3 for ms in re.findall(r'dt: ([\d.]+)ms', out)]
  found: Result = {'step_seconds': round(statistics.median(seconds[10:] or seconds), 4)}
  if number is None:
    marks = [str(step) for step in range(every, steps + 1, every)]
    script = str(pathlib.Path(__file__).with_name('evaluate.py'))
    found['bits_per_byte'] = json.loads(run(script, tag, *marks).splitlines()[-1])
  shutil.rmtree(base / 'base_checkpoints' / tag)
  return found


def of_paxlite(
  args: argparse.Namespace, scale: float, seed: int, steps: int, number: int | None = None
) -> Result:
  name = f'd{args.depth}_w{args.width}_n{steps}_x{scale:g}_s{seed}'
  if number is not None:
    name += f'_t{number}'
  run, every = args.runs / 'runs' / '_'.join([name, *args.values]), max(1, steps // 3)
  shutil.rmtree(run, ignore_errors=True)
  data = args.runs / 'paxlite'
  words = [
    f'--folder={run}', f'DATASET_PATH={data}', f'VOCAB_PATH={data / "tokenizer.model"}',
    f'VOCAB_SIZE={VOCAB_SIZE}', f'MAX_SEQ_LEN={LENGTH}', f'PERCORE_BATCH_SIZE={ROWS}',
    f'NUM_LAYERS={args.depth}', f'MODEL_DIMS={args.width}', f'NUM_HEADS={args.width // 64}',
    f'HIDDEN_DIMS={4 * args.width}', f'MAX_STEPS={steps}', f'SEED={seed}',
    f'LEARNING_RATE={RATE * scale}', f'CHECKPOINT_EVERY_N_STEPS={steps}',
    f'EVAL_INTERVAL_STEPS={every}', *args.values,
  ]  # fmt: skip
  if number is not None:
    words.append('MAX_EVAL_BATCHES=1')
  command = [sys.executable, '-m', 'paxlite', 'train', 'benchmarks.nanochat.experiment.Beside']
  subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
  metrics = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  seconds = [line['step_seconds'] for line in metrics if line.get('step_seconds')]
  size = json.loads((data / 'held_out.json').read_text())
  lines = [json.loads(line) for line in (run / 'eval_metrics.jsonl').read_text().splitlines()]
  bits = size['tokens'] / size['bytes'] / 0.6931471805599453
  return {
    'step_seconds': round(statistics.median(seconds[1:] or seconds), 4),
    'bits_per_byte': {str(line['step']): line['avg_xent'] * bits for line in lines},
  }


SIDES = {'nanochat': of_nanochat, 'paxlite': of_paxlite}


def table(found: list[Result]) -> str:
  """Returns the best scale of each side, depth and number of steps, and all others below it."""
  lines = []
  for r in sorted(found, key=lambda r: (r['depth'], r['steps'], r['side'], r['scale'], r['seed'])):
    bits = ', '.join(f'{value:.3f}' for value in r['bits_per_byte'].values())
    names = ' '.join(str(r[n]) for n in ('side', 'depth', 'width', 'steps', 'scale', 'seed'))
    lines.append(f'{names} {r.get("values", "")}: {bits}; {r["step_seconds"]:.3f} s')
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
