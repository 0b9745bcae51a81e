"""Asks a trained model how likely a text is, and which of several answers it finds likeliest.

    python examples/evaluate.py runs/pretrain --text=my.txt

The model is the folder of a run or of imported weights. `paxlite zero-shot` and `paxlite lm-eval`
do this for whole sets of questions: docs/evaluation.md.
"""

import argparse
import math
import pathlib

import jax
import jax.numpy as jnp

import paxlite

QUESTIONS = {
  'And it came to': [' pass', ' house', ' green'],
  'the children of': [' Israel', ' is', ' very'],
  'Thus saith the': [' LORD', ' two', ' slept'],
}


def log_likelihood(model: paxlite.TrainedModel, text: str, after: str = '') -> float:
  """Returns the log-probability of the tokens of `text` that follow `after`, in nats."""
  inference = model.inference
  ids, given = inference.encode(after + text), inference.encode(after) if after else []
  log_p = jax.nn.log_softmax(model.logits(ids))
  # Row t of the logits is the model's opinion on token t + 1.
  first = max(len(given), 1)
  targets = jnp.asarray(ids[first:])
  return float(log_p[jnp.arange(first - 1, len(ids) - 1), targets].sum())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model', help='a folder of a run, or of imported weights')
  parser.add_argument('--text', type=pathlib.Path, help='a text file')
  parser.add_argument('--characters', type=int, default=400, help='how much of it is read')
  args = parser.parse_args()
  model = paxlite.load(args.model)

  text = 'In the beginning God created the heaven and the earth.'
  if args.text:
    text = args.text.read_text()[: args.characters]
  bits = -log_likelihood(model, text) / math.log(2)
  print(f'{bits / len(text.encode()):.3f} bits per byte')

  for question, answers in QUESTIONS.items():
    scores = {a: log_likelihood(model, a, after=question) for a in answers}
    print(f'{question}{max(scores, key=scores.__getitem__)}')


if __name__ == '__main__':
  main()
