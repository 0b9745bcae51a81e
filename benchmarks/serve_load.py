"""python benchmarks/serve_load.py --url=http://127.0.0.1:8000/v1 [--clients=64] [--requests=4]

Lets many clients at a time ask a server that answers as OpenAI's API does, each for one streamed
chat after another, with prompts and answers of many lengths. Prints how many were lost, the median
and the 99th percentile of the time to the first piece of an answer and between two pieces, and
tokens a second over all. Needs the packages openai and httpx.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time

TEXT = 'the quick brown fox jumps over a lazy dog while seven rivers run into the sea'


async def client(api: object, model: str, number: int, args: argparse.Namespace) -> list[dict]:
  """Asks for one chat after another; returns what was seen of each."""
  draw = random.Random(number)
  found = []
  for _ in range(args.requests):
    question = ' '.join(draw.choices(TEXT.split(), k=draw.randint(5, 120)))
    started, times, usage = time.perf_counter(), [], None
    try:
      stream = await api.chat.completions.create(
        model=model,
        messages=[dict(role='user', content=f'Continue this story: {question}')],
        max_tokens=draw.randint(8, args.new),
        temperature=0.8,
        seed=number,
        stream=True,
        stream_options=dict(include_usage=True),
      )
      async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
          times.append(time.perf_counter())
        if chunk.usage is not None:
          usage = chunk.usage
    except Exception as e:
      found.append(dict(error=f'{type(e).__name__}: {e}'))
      continue
    whole = usage is not None
    found.append(
      dict(
        first=times[0] - started if times else None,
        between=[b - a for a, b in itertools.pairwise(times)],
        tokens=usage.completion_tokens if whole else 0,
        error=None if whole else 'the stream ended before its usage',
      )
    )
  return found


async def measure(args: argparse.Namespace) -> dict:
  """Returns the figures of all clients."""
  import httpx
  import openai

  limits = httpx.Limits(max_connections=args.clients, max_keepalive_connections=args.clients)
  http = httpx.AsyncClient(limits=limits, timeout=900)
  api = openai.AsyncOpenAI(base_url=args.url, api_key='none', http_client=http, max_retries=0)
  model = (await api.models.list()).data[0].id
  started = time.perf_counter()
  by_client = await asyncio.gather(*(client(api, model, i, args) for i in range(args.clients)))
  seconds = time.perf_counter() - started
  seen = [one for found in by_client for one in found]
  whole = [one for one in seen if one['error'] is None]
  firsts = [one['first'] for one in whole if one['first'] is not None]
  betweens = [gap for one in whole for gap in one['between']]
  tokens = sum(one['tokens'] for one in whole)
  percentile = lambda values, p: round(statistics.quantiles(values, n=100)[p - 1], 3)
  return {
    'model': model, 'clients': args.clients, 'requests': len(seen), 'lost': len(seen) - len(whole),
    'errors': sorted({one['error'] for one in seen if one['error']})[:3],
    'first_p50': percentile(firsts, 50), 'first_p99': percentile(firsts, 99),
    'between_p50': percentile(betweens, 50), 'between_p99': percentile(betweens, 99),
    'tokens': tokens, 'tokens_per_second': round(tokens / seconds, 1), 'seconds': round(seconds, 1),
    'date': time.strftime('%Y-%m-%d'), 'machine': f'{os.cpu_count()} cores, clients included',
  }  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--url', default='http://127.0.0.1:8000/v1')
  parser.add_argument('--clients', type=int, default=64)
  parser.add_argument('--requests', type=int, default=4, help='of each client')
  parser.add_argument('--new', type=int, default=96, help='most tokens of an answer')
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()
  result = asyncio.run(measure(args))
  print(json.dumps(result, indent=2))
  if args.json:
    with open(args.json, 'a') as f:
      f.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()
