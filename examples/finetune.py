"""Fine-tunes all weights of an imported model on questions and answers (SFT).

    python examples/finetune.py --weights=weights/smollm --data=chats.jsonl --folder=runs/finetune

Without --weights it makes a small Llama with random weights, and without --data sums, so that the
script runs anywhere in half a minute. docs/weights.md says how to import published weights and
which formats of data there are.
"""

import argparse
import json
import pathlib

import paxlite


def sums(file: pathlib.Path) -> str:
  """Writes questions such as '3 + 4 =', and returns the path."""
  file.parent.mkdir(parents=True, exist_ok=True)
  pairs = [(a, b) for a in range(10) for b in range(10)]
  lines = [json.dumps({'inputs': f'{a} + {b} =', 'targets': f' {a + b}'}) for a, b in pairs]
  file.write_text('\n'.join(lines) + '\n')
  return str(file)


def tuned(name: str, about: str, rate: float, **values: object) -> None:
  """Trains the experiment called `name` on the weights and the data of the command line."""
  parser = argparse.ArgumentParser(description=about.splitlines()[0])
  parser.add_argument('--weights', help='a folder that paxlite import has written')
  parser.add_argument('--data', help='a file of JSON lines')
  parser.add_argument('--folder', type=pathlib.Path, default=pathlib.Path('runs/tuned'))
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--rate', type=float, default=rate, help='the learning rate')
  parser.add_argument('--prompt', default='3 + 4 =')
  args = parser.parse_args()
  if args.weights is None:
    from small_weights import imported

    args.weights = imported(args.folder)

  # The weights say which model it is, so the experiment states only how it is trained.
  experiment = paxlite.get(name)(
    CHECKPOINT_RESTORE_PATH=args.weights,
    TRAIN_FILES=[args.data or sums(args.folder / 'sums.jsonl')],
    MAX_SEQ_LEN=128,
    PERCORE_BATCH_SIZE=4,
    ICI_MESH_SHAPE=[1, 1, 1],
    DCN_MESH_SHAPE=[1, 1, 1],
    FPROP_DTYPE='float32',
    MAX_STEPS=args.steps,
    LR_COS_WARMUP=1,
    LR_COS_DECAY_END=max(args.steps, 2),
    LEARNING_RATE=args.rate,
    SUMMARY_INTERVAL_STEPS=1,
    **values,
  )
  run = paxlite.train(experiment, args.folder / 'run')
  print(f'loss: {run.metrics["loss"][0]:.3f} at first, {run.metrics["loss"][-1]:.3f} at last')
  print(args.prompt + run.generate(args.prompt, max_new_tokens=4))


if __name__ == '__main__':
  tuned('HuggingFaceSFT', __doc__, rate=3e-3)
