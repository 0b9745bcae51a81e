"""python -m benchmarks.preferences WEIGHTS [--steps=8] [--pairs=4] [--rounds=2]

DPO steps of paxlite and of trl for the same weights and pairs, on this machine, in turn: a line of
JSON each, with the median seconds of a step and the loss of each step. WEIGHTS is a folder that
`paxlite import` has written. Needs trl, torch and transformers.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CAPITALS = 'Paris', 'Rome', 'Madrid', 'Berlin', 'Tokyo', 'Cairo', 'Lima', 'Oslo', 'Athens', 'Vienna'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('weights', type=pathlib.Path)
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--pairs', type=int, default=4, help='pairs of a step')
  parser.add_argument('--rounds', type=int, default=2)
  parser.add_argument('--trl', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.trl:
    of_trl(args.trl, args)
    return
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_pairs(folder / 'pairs.jsonl', args.pairs * args.steps)
    command('export', f'--checkpoint={args.weights}', '--to=hf', f'--path={folder / "hf"}')
    for number in range(args.rounds):
      print(json.dumps(of_paxlite(folder, number, args)), flush=True)
      flags = [f'--trl={folder}', f'--steps={args.steps}', f'--pairs={args.pairs}']
      module = [sys.executable, '-m', 'benchmarks.preferences', str(args.weights), *flags]
      ended = subprocess.run(module, check=True, stdout=subprocess.PIPE, text=True)
      print(ended.stdout.splitlines()[-1], flush=True)


def write_pairs(path: pathlib.Path, count: int) -> None:
  """Writes pairs of which all have nearly the same length."""
  with path.open('w') as file:
    for i in range(count):
      question = [{'role': 'user', 'content': f'Question {i}: how do I get to {CAPITALS[i % 10]}?'}]
      answer = lambda text: [{'role': 'assistant', 'content': text * 6}]
      pair = {
        'chosen': answer('By train, and slowly. '),
        'rejected': answer('You will not. Stay. '),
      }
      file.write(json.dumps({'prompt': question, **pair}) + '\n')


def of_paxlite(folder: pathlib.Path, number: int, args: argparse.Namespace) -> dict[str, object]:
  run = folder / f'run{number}'
  command(
    'finetune', str(args.weights), '--method=dpo', f'--folder={run}', 'MAX_SEQ_LEN=160',
    f'TRAIN_FILES={folder / "pairs.jsonl"}', f'PERCORE_BATCH_SIZE={args.pairs}',
    f'MAX_STEPS={args.steps}', 'SUMMARY_INTERVAL_STEPS=1', 'FPROP_DTYPE=float32',
    'CHECKPOINT_POLICY=SAVE_EVERYTHING', 'LR_SCHEDULE=constant', 'OPTIMIZER=adamw',
    'WEIGHT_DECAY=0', 'ADAM_BETA2=0.999', 'ADAM_EPSILON=1e-8', 'LEARNING_RATE=1e-6',
    'CLIP_GRADIENT_NORM_TO_VALUE=1',
  )  # fmt: skip
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  seconds = [r['step_seconds'] for r in records if r.get('step_seconds')]
  return result('paxlite', seconds, [r['loss'] for r in records])


def of_trl(folder: pathlib.Path, args: argparse.Namespace) -> None:
  import datasets
  import transformers
  import trl

  times: list[float] = []

  class Clock(transformers.TrainerCallback):
    def on_step_begin(self, *_: object, **__: object) -> None:
      self.before = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
      times.append(time.perf_counter() - self.before)

  config = trl.DPOConfig(
    str(folder / 'trl'), per_device_train_batch_size=args.pairs, max_steps=args.steps, beta=0.1,
    learning_rate=1e-6, lr_scheduler_type='constant', logging_steps=1, report_to=[], use_cpu=True,
    bf16=False, gradient_checkpointing=False, save_strategy='no', disable_tqdm=True,
    max_grad_norm=1.0,
  )  # fmt: skip
  load = transformers.AutoModelForCausalLM.from_pretrained
  trainer = trl.DPOTrainer(
    load(folder / 'hf', dtype='float32'), load(folder / 'hf', dtype='float32'), config,
    train_dataset=datasets.load_dataset('json', data_files=str(folder / 'pairs.jsonl'))['train'],
    processing_class=transformers.AutoTokenizer.from_pretrained(folder / 'hf'), callbacks=[Clock()],
  )  # fmt: skip
  trainer.train()
  losses = [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
  print(json.dumps(result('trl', times[1:], losses)))


def result(name: str, seconds: list[float], losses: list[float]) -> dict[str, object]:
  median = round(statistics.median(seconds), 4)
  return {'name': name, 'step_seconds': median, 'losses': [round(float(x), 5) for x in losses]}


def command(*words: str) -> None:
  subprocess.run([sys.executable, '-m', 'paxlite', *words], check=True, stdout=sys.stderr)


if __name__ == '__main__':
  main()
