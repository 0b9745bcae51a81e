"""Trains a small GPT on a text file, and continues a prompt with it.

    python examples/pretrain.py --text=my.txt --folder=runs/pretrain

Without --text it reads the texts that come with paxlite. A second call continues the run: give more
--steps, or press Ctrl-C in between. It takes about five minutes on two cores.
"""

import argparse

import paxlite


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--text', nargs='*', help='text files, plain or .xz')
  parser.add_argument('--folder', default='runs/pretrain', help='checkpoints and metrics')
  parser.add_argument('--steps', type=int, default=500)
  parser.add_argument('--layers', type=int, default=4)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--prompt', default='And it came to pass')
  args = parser.parse_args()

  # Arguments of an experiment are its attributes: `paxlite show DemoGPT` lists them.
  values = {'TRAIN_FILES': args.text} if args.text else {}
  experiment = paxlite.get('DemoGPT')(
    NUM_LAYERS=args.layers,
    MODEL_DIMS=args.width,
    HIDDEN_DIMS=4 * args.width,
    MAX_STEPS=args.steps,
    CHECKPOINT_EVERY_N_STEPS=100,
    EVAL_INTERVAL_STEPS=min(100, args.steps),
    MAX_EVAL_BATCHES=8,
    **values,
  )
  run = paxlite.train(experiment, args.folder, accept_changes=True)

  print('held-out loss by step:')
  for step, loss in zip(run.evaluations['step'], run.evaluations['avg_xent'], strict=True):
    print(f'  {step:6} {loss:.3f}')
  print(run.generate(args.prompt, max_new_tokens=40))


if __name__ == '__main__':
  main()
