"""python -m benchmarks.trl_steps WEIGHTS [--methods sft lora dpo] [--steps=8] [--rows=4]

Steps of paxlite and of trl for the same weights and records, on this machine, in turn: a line of
JSON each, with the median seconds of a step, the most memory of the process, and the loss of each
step. WEIGHTS is a folder that `paxlite import` has written. Needs peft, torch, transformers, trl.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

METHODS = 'sft', 'lora', 'dpo'
CAPITALS = 'Paris', 'Rome', 'Madrid', 'Berlin', 'Tokyo', 'Cairo', 'Lima', 'Oslo', 'Athens', 'Vienna'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('weights', type=pathlib.Path)
  parser.add_argument('--methods', nargs='*', default=list(METHODS), choices=METHODS)
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--rows', type=int, default=4, help='conversations, or pairs, of a step')
  parser.add_argument('--rounds', type=int, default=2)
  parser.add_argument('--trl', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.trl:
    of_trl(args.trl, args.methods[0], args)
    return
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_records(folder, args.rows * args.steps)
    paxlite('export', f'--checkpoint={args.weights}', '--to=hf', f'--path={folder / "hf"}')
    for method in args.methods:
      for number in range(args.rounds):
        print(json.dumps(of_paxlite(folder, method, number, args)), flush=True)
        flags = [f'--methods={method}', f'--steps={args.steps}', f'--rows={args.rows}']
        module = [sys.executable, '-m', 'benchmarks.trl_steps', str(args.weights), *flags]
        process = subprocess.run([*module, f'--trl={folder}'], check=True, stdout=subprocess.PIPE)
        print(process.stdout.decode().splitlines()[-1], flush=True)


def write_records(folder: pathlib.Path, count: int) -> None:
  """Writes pairs and conversations of which all have nearly the same length."""
  with (folder / 'dpo.jsonl').open('w') as pairs, (folder / 'sft.jsonl').open('w') as chats:
    for i in range(count):
      question = [{'role': 'user', 'content': f'Question {i}: how do I get to {CAPITALS[i % 10]}?'}]
      answer = lambda text: [{'role': 'assistant', 'content': text * 6}]
      pair = {
        'chosen': answer('By train, and slowly. '),
        'rejected': answer('You will not. Stay. '),
      }
      pairs.write(json.dumps({'prompt': question, **pair}) + '\n')
      chats.write(json.dumps({'prompt': question, 'completion': pair['chosen']}) + '\n')


def file_of(folder: pathlib.Path, method: str) -> pathlib.Path:
  return folder / ('dpo.jsonl' if method == 'dpo' else 'sft.jsonl')


def of_paxlite(
  folder: pathlib.Path, method: str, number: int, args: argparse.Namespace
) -> dict[str, object]:
  run, length = folder / f'{method}{number}', 160 if method == 'dpo' else 80
  kibibytes = paxlite(
    'finetune', str(args.weights), f'--method={method}', f'--folder={run}', f'MAX_SEQ_LEN={length}',
    f'TRAIN_FILES={file_of(folder, method)}', f'PERCORE_BATCH_SIZE={args.rows}',
    f'MAX_STEPS={args.steps}', 'SUMMARY_INTERVAL_STEPS=1', 'FPROP_DTYPE=float32',
    'CHECKPOINT_POLICY=SAVE_EVERYTHING', 'LR_SCHEDULE=constant', 'OPTIMIZER=adamw',
    'WEIGHT_DECAY=0', 'ADAM_BETA2=0.999', 'ADAM_EPSILON=1e-8', 'LEARNING_RATE=1e-6',
    'CLIP_GRADIENT_NORM_TO_VALUE=1', 'SAMPLE_PROMPT=None', 'LORA_RANK=16',
  )  # fmt: skip
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  seconds = [r['step_seconds'] for r in records if r.get('step_seconds')]
  return result(method, 'paxlite', seconds, kibibytes, [r['loss'] for r in records])


def of_trl(folder: pathlib.Path, method: str, args: argparse.Namespace) -> None:
  import datasets
  import peft
  import transformers
  import trl

  times: list[float] = []

  class Clock(transformers.TrainerCallback):
    def on_step_begin(self, *_: object, **__: object) -> None:
      self.before = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
      times.append(time.perf_counter() - self.before)

  kind = trl.DPOConfig if method == 'dpo' else trl.SFTConfig
  config = kind(
    str(folder / 'trl'), per_device_train_batch_size=args.rows, max_steps=args.steps,
    learning_rate=1e-6, lr_scheduler_type='constant', logging_steps=1, report_to=[], use_cpu=True,
    bf16=False, gradient_checkpointing=False, save_strategy='no', disable_tqdm=True,
    max_grad_norm=1.0,
  )  # fmt: skip
  load = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder / 'hf', dtype='float32')
  files = str(file_of(folder, method))
  common = dict(
    args=config,
    train_dataset=datasets.load_dataset('json', data_files=files)['train'],
    processing_class=transformers.AutoTokenizer.from_pretrained(folder / 'hf'),
    callbacks=[Clock()],
  )
  if method == 'dpo':
    trainer = trl.DPOTrainer(load(), load(), **common)
  else:
    factors = peft.LoraConfig(r=16, lora_alpha=16, target_modules='all-linear')
    trainer = trl.SFTTrainer(load(), peft_config=factors if method == 'lora' else None, **common)
  trainer.train()
  losses = [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(json.dumps(result(method, 'trl', times[1:], most, losses)))


def result(
  method: str, name: str, seconds: list[float], kibibytes: int, losses: list[float]
) -> dict[str, object]:
  return {
    'method': method,
    'name': name,
    'step_seconds': round(statistics.median(seconds), 4),
    'gibibytes': round(kibibytes / 2**20, 2),
    'losses': [round(float(x), 5) for x in losses],
  }


def paxlite(*words: str) -> int:
  """Runs a command; returns the most memory that its process had, in KiB."""
  process = subprocess.Popen([sys.executable, '-m', 'paxlite', *words], stdout=sys.stderr)
  _, status, usage = os.wait4(process.pid, 0)
  if status:
    raise SystemExit(f'paxlite {" ".join(words)} failed')
  return usage.ru_maxrss


if __name__ == '__main__':
  main()
