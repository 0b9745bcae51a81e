"""python benchmarks/harness.py --checkpoint=weights/smollm --text=FILE [--count=32]

Measures requests a second of EleutherAI's harness by paxlite's class for it: answers that end with
a sentence, and the two choices of questions after five solved examples. The questions are pieces of
a text, and the answers of a model to them mean nothing. Each kind runs twice, and the second time
is counted, which has other requests of the same sizes. Compare versions of paxlite by running it in
turn with each on PYTHONPATH.
"""

import argparse
import json
import pathlib
import time
from typing import Any


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--checkpoint', required=True)
  parser.add_argument('--text', type=pathlib.Path, required=True, help='a text of 200 kB or more')
  parser.add_argument('--count', type=int, default=32, help='requests of a kind')
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()

  from lm_eval.api.instance import Instance

  from paxlite.eval.commands.lm_eval import PaxliteLM

  model = PaxliteLM(checkpoint=args.checkpoint, dtype='float32')
  words = args.text.read_text().split()

  def piece(number: int, length: int) -> str:
    start = number * 97 % (len(words) - length)
    return ' '.join(words[start : start + length])

  def asked(kind: str, arguments: tuple[Any, ...]) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

  rule = {'until': ['.', '\n'], 'max_gen_toks': 64}
  shots = '\n\n'.join(f'{piece(i, 60)}\nanswer: {"yes" if i % 2 else "no"}' for i in range(5))
  found: dict[str, Any] = {}
  for kind in ('generate_until', 'loglikelihood'):
    for first in (0, 1000):
      numbers = range(first, first + args.count)
      if kind == 'generate_until':
        requests = [asked(kind, (piece(i, 20 + 9 * (i % 13)), rule)) for i in numbers]
      else:
        texts = [f'{shots}\n\n{piece(i, 20 + 3 * (i % 13))}\nanswer:' for i in numbers]
        requests = [asked(kind, (text, a)) for text in texts for a in (' yes it is', ' no')]
      start = time.perf_counter()
      answers = getattr(model, kind)(requests)
      seconds = time.perf_counter() - start
    assert len(answers) == len(requests)
    found[kind] = round(len(requests) / seconds, 3)
    print(
      f'{kind}: {len(requests)} requests in {seconds:.1f} s: {found[kind]} a second', flush=True
    )
  if args.json:
    with open(args.json, 'a') as f:
      f.write(json.dumps(found) + '\n')


if __name__ == '__main__':
  main()
