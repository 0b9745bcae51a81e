"""Bits per byte of nanochat's checkpoints on held-out documents: evaluate.py TAG STEP [STEP ...].

Runs with nanochat's folder on PYTHONPATH and NANOCHAT_BASE_DIR set. Each document follows BOS. One
of more tokens than a row is cut, and BOS stands before each part. Prints a line of JSON.
"""

import json
import math
import pathlib
import sys

import torch
from nanochat.checkpoint_manager import build_model
from nanochat.common import get_base_dir

BATCH = 16


def main() -> None:
  tag, *steps = sys.argv[1:]
  base = pathlib.Path(get_base_dir())
  texts = json.loads((base / 'held_out.json').read_text())
  found = {}
  for step in steps:
    place = str(base / 'base_checkpoints' / tag)
    model, tokenizer, meta = build_model(place, int(step), torch.device('cpu'), 'eval')
    nats = _nats(model, tokenizer, texts, meta['max_seq_len'])
    found[step] = nats / math.log(2) / sum(len(text.encode()) for text in texts)
  print(json.dumps(found))


@torch.no_grad()
def _nats(model, tokenizer, texts, length):
  bos = tokenizer.get_bos_token_id()
  encoded = tokenizer.encode(texts)
  rows = [ids[i : i + length] for ids in encoded for i in range(0, len(ids), length)]
  rows.sort(key=len)  # so that there is little padding
  total = 0.0
  for first in range(0, len(rows), BATCH):
    part = rows[first : first + BATCH]
    inputs = torch.full((len(part), len(part[-1])), bos)
    labels = torch.full_like(inputs, -1)
    for i, ids in enumerate(part):
      inputs[i, 1 : len(ids)] = torch.tensor(ids[:-1])
      labels[i, : len(ids)] = torch.tensor(ids)
    losses = model(inputs, labels, loss_reduction='none').view(-1).double()
    total += losses[labels.view(-1) >= 0].sum().item()
  return total


if __name__ == '__main__':
  main()
