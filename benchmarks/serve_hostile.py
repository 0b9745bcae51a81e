"""python benchmarks/serve_hostile.py [--minutes=60] [--clients=64] [--checkpoint=FOLDER]

Serves a small model, trained for one step, to many clients, of which a third are hostile: they
draw values of every field, cut connections, send halves of requests, giant prompts, odd grammars,
special tokens and halves of surrogate pairs. Checks that each honest answer is that of the same
request alone, that memory stays, that /health answers in 2 seconds, that no request fails in the
server, and that SIGTERM ends it in order. Prints a table; the exit code is 1 where a check fails.
Needs the extra serve and the package httpx.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx

ROOT = pathlib.Path(__file__).parent.parent
SIZES = 'NUM_LAYERS=2', 'MODEL_DIMS=64', 'NUM_HEADS=4', 'HIDDEN_DIMS=192', 'MAX_SEQ_LEN=256'
TEMPLATE = '{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}assistant:'
GRACE, MOST_GROWTH, MOST_HEALTH = 20, 50e6, 2.0
TEXT = 'And it came to pass in those days that there went out a decree from the king'
SCHEMA = dict(type='object', properties=dict(age=dict(type='integer')), required=['age'])
FORM = lambda schema: dict(type='json_schema', json_schema=dict(name='x', schema=schema))
# of a field, by a hostile client
ODD: list[Any] = [
  None, True, -1, 0, 1, 3, 1e9, -1e-9, 1 << 31, 1 << 63, 10**40, 0.5, '', 'a', '\u0000', '</s>', [],
  {}, [[]], [None], ['a'] * 99, {'a': 1}, {'-1': 1}, {'5': 101}, {'9' * 40: 1}, [1 << 40],
  '\x1b[2J', 'é' * 2000,
]  # fmt: skip
FIELDS = (  # separated by spaces
  'model messages prompt temperature top_p top_k min_p seed n stop max_tokens logit_bias logprobs '
  'max_completion_tokens presence_penalty frequency_penalty repetition_penalty top_logprobs echo '
  'stream stream_options response_format tools tool_choice chat_template_kwargs min_tokens user '
  'stop_token_ids ignore_eos best_of suffix metadata no_such_field'
)
GRAMMARS: list[Any] = [
  dict(const='a<|endoftext|>b</s>'), dict(type='string', pattern='^(a?){500}a{500}$'),
  dict(type='string', pattern='(a+)+$'), dict(type='string', pattern='['), {'$ref': '#'},
  {'$ref': 'http://127.0.0.1:1/x'}, dict(enum=[]), dict(enum=[str(i) for i in range(20_000)]),
  dict(type='array', minItems=10**6), dict(type='integer', minimum=5, maximum=4), dict(type='x'),
  dict(allOf=[dict(type='string'), dict(type='integer')]),
]  # fmt: skip
RAW = [
  b'{', b'[1]', b'\xff\xfe', b'{"model": "\xc3\x28"}', b'{"stop": "\\ud800"}', b'{"\\ud800": 1}',
  b'{"a": ' + b'[' * 3000 + b']' * 3000 + b'}', b'{"temperature": 1e400}', b'{"temperature": NaN}',
  b'{"metadata": [[]' + b',[]' * 500_000 + b']}', b'null', b'',
  b'{"max_tokens": 1' + b'0' * 400 + b'}',
]  # fmt: skip


class Server:
  """A process that serves a model."""

  def __init__(self, folder: str, log: pathlib.Path):
    command = [
      sys.executable, '-m', 'paxlite', 'serve', folder, '--port=0', '--most_rows=8', '--name=m',
      f'--grace={GRACE}', f'CHAT_TEMPLATE={TEMPLATE}',
    ]  # fmt: skip
    with log.open('w') as errors:
      self.process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
      )
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    assert ' answers at ' in line, log.read_text()
    self.url = line.split(' answers at ')[1].strip()
    self.port = int(self.url.split(':')[2].split('/')[0])

  @property
  def memory(self) -> int:
    """The resident bytes of the process."""
    status = pathlib.Path(f'/proc/{self.process.pid}/status').read_text()
    return 1024 * int(status.split('VmRSS:')[1].split()[0])


class Seen:
  """What the clients have seen.

  Attributes:
    counts: How often each thing happened.
    wrong: Descriptions of what must not happen.
    health: The longest time that /health took, in seconds.
  """

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.wrong: list[str] = []
    self.health = 0.0


def honest_requests(draw: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
  """Returns paths and bodies of requests whose answers do not depend on anything else."""
  found: list[tuple[str, dict[str, Any]]] = []
  options: list[dict[str, Any]] = [
    dict(temperature=0), dict(temperature=0.8), dict(top_p=0.7), dict(top_k=5, min_p=0.02),
    dict(presence_penalty=0.5, frequency_penalty=0.2), dict(repetition_penalty=1.3),
    dict(logit_bias={'300': 5, '400': -100}), dict(n=2), dict(stop=['e', 'th']), dict(min_tokens=4),
  ]  # fmt: skip
  for i in range(count):
    text = ' '.join(draw.choices(TEXT.split(), k=draw.randint(1, 60)))
    body = dict(model='m', seed=i, max_tokens=draw.randint(1, 40), **options[i % len(options)])
    body['max_tokens'] = max(body['max_tokens'], body.get('min_tokens', 0))
    if i % 2:
      found.append(('/completions', body | dict(prompt=text, logprobs=2 if i % 3 else None)))
    else:
      chat = dict(messages=[dict(role='user', content=text)])
      form = dict(response_format=FORM(SCHEMA), max_tokens=40) if i % 8 == 6 else {}
      found.append(('/chat/completions', body | chat | form))
  return found


def gist(answer: dict[str, Any]) -> Any:
  """Returns what of an answer is the same whenever it is given."""
  said = lambda c: c['text'] if 'text' in c else c['message']['content']
  return [(said(c), c['finish_reason']) for c in answer['choices']]


async def honest(server: Server, pairs: list, number: int, until: float, seen: Seen) -> None:
  """Asks one request after another whose answer is known."""
  draw = random.Random(number)
  async with httpx.AsyncClient(timeout=120) as client:
    while time.monotonic() < until:
      (path, body), expected = draw.choice(pairs)
      try:
        found = await client.post(server.url + path, json=body)
      except httpx.HTTPError as e:
        seen.wrong.append(f'an honest request was lost: {type(e).__name__} {e}')
        continue
      if found.status_code == 429:  # too many requests wait
        seen.counts['honest, told to wait'] += 1
        await asyncio.sleep(draw.random())
        continue
      seen.counts['honest'] += 1
      if found.status_code != 200:
        seen.wrong.append(f'an honest request got {found.status_code}: {found.text[:200]}')
      elif gist(found.json()) != expected:
        seen.wrong.append(f'{body} has another answer than alone: {gist(found.json())}')


def hostile_body(draw: random.Random) -> bytes:
  """Returns the body of a request that nobody means."""
  kind = draw.randrange(5)
  if kind == 0:
    return draw.choice(RAW)
  body: dict[str, Any] = dict(model='m', messages=[dict(role='user', content='a')], max_tokens=8)
  if kind == 1:
    body |= dict(response_format=FORM(draw.choice(GRAMMARS)))
  elif kind == 2:
    text = draw.choice(['</s><s>system: ', 'word ', '\x1b[31m', 'a' * 99, '\u202e', '𝕏 '])
    count = min(draw.choice([1, 9, 5_000, 1_000_000]), 6_000_000 // len(text.encode()))
    body['messages'][0]['content'] = text * count
  else:
    body |= {draw.choice(FIELDS.split()): draw.choice(ODD) for _ in range(draw.randint(1, 4))}
    if draw.random() < 0.3:
      body['prompt'] = body.pop('messages', None)
  return json.dumps(body).encode()


async def hostile(server: Server, number: int, until: float, seen: Seen) -> None:
  """Sends one hostile request after another."""
  draw = random.Random(f'hostile {number}')
  while time.monotonic() < until:
    body = hostile_body(draw)
    path = draw.choice(['/v1/completions', '/v1/chat/completions', '/v1/models', '/%1b[2J'])
    head = f'POST {path} HTTP/1.1\r\nHost: {draw.choice(["localhost"] * 5 + ["evil.example"])}\r\n'
    whole = f'{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n'.encode() + body
    how = draw.choice(['whole', 'whole', 'whole', 'cut', 'held', 'left'])
    try:
      reader, writer = await asyncio.open_connection('127.0.0.1', server.port)
      sent = whole[: draw.randint(0, len(whole))] if how in ('cut', 'held') else whole
      writer.write(sent)
      if how == 'whole':
        line = await asyncio.wait_for(reader.readline(), 120)
        status = line.split()[1].decode() if line.split()[1:] else 'closed'
        seen.counts[f'hostile, {status}'] += 1
        if status.startswith('5') and status not in ('503', '504'):
          seen.wrong.append(f'{status} after {path} {body[:300]!r}')
      else:
        seen.counts[f'hostile, {how}'] += 1
        await asyncio.sleep(draw.uniform(0, 15 if how == 'held' else 0.3))
      writer.close()
    except (OSError, TimeoutError) as e:
      seen.counts[f'hostile, {type(e).__name__}'] += 1


async def watch(server: Server, until: float, seen: Seen) -> None:
  """Asks for /health all the time, by a connection of its own each."""
  while time.monotonic() < until:
    start = time.monotonic()
    try:
      async with httpx.AsyncClient(timeout=30) as client:
        found = await client.get(f'http://127.0.0.1:{server.port}/health')
      assert found.json()['status'] == 'ok'
    except (httpx.HTTPError, AssertionError, ValueError) as e:
      seen.wrong.append(f'/health has failed: {type(e).__name__} {e}')
    seen.health = max(seen.health, time.monotonic() - start)
    await asyncio.sleep(0.2)


async def measured(server: Server, minutes: float, clients: int) -> tuple[Seen, list[int]]:
  """Lets the clients ask; returns what they saw, and the memory after each tenth of the time."""
  asked, pairs = honest_requests(random.Random(0), 40), []
  async with httpx.AsyncClient(timeout=300) as client:
    for path, body in asked:
      found = await client.post(server.url + path, json=body)
      assert found.status_code == 200, found.text
      pairs.append(((path, body), gist(found.json())))
  seen, until = Seen(), time.monotonic() + 60 * minutes
  kinds = [
    hostile(server, i, until, seen) if i % 3 == 0 else honest(server, pairs, i, until, seen)
    for i in range(clients)
  ]
  tasks = [asyncio.ensure_future(kind) for kind in (*kinds, watch(server, until, seen))]
  memory = []
  for i in range(10):
    await asyncio.sleep(max(0, until - time.monotonic()) / (10 - i))
    memory.append(server.memory)
  await asyncio.gather(*tasks)
  return seen, memory


def orderly(server: Server) -> tuple[bool, float]:
  """Asks the server to end; returns whether it does in order, and after how many seconds."""
  start = time.monotonic()
  server.process.send_signal(signal.SIGTERM)
  try:
    code = server.process.wait(GRACE + 10)
  except subprocess.TimeoutExpired:
    code = -1
  return code == 0, time.monotonic() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--minutes', type=float, default=60)
  parser.add_argument('--clients', type=int, default=64)
  parser.add_argument('--checkpoint', help='what is served; otherwise a small model is made')
  parser.add_argument('--json', help='append the result to this file')
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    checkpoint = args.checkpoint or f'{folder}/m'
    if not args.checkpoint:
      command = [sys.executable, '-m', 'paxlite', 'train', 'DemoGPTAdam']
      command += [f'--job_log_dir={checkpoint}', *SIZES, 'MAX_STEPS=1']
      subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    log = pathlib.Path(folder) / 'server.log'
    server = Server(checkpoint, log)
    try:
      seen, memory = asyncio.run(measured(server, args.minutes, args.clients))
      ended, seconds = orderly(server)
    finally:
      server.process.kill()
      server.process.wait()
    traces = log.read_text().count('Traceback')
  growth = max(memory) - memory[0]
  checks = {
    'honest answers': (seen.counts['honest'], seen.counts['honest'] > 0),
    'what must not happen': (len(seen.wrong), not seen.wrong),
    'tracebacks in the log': (traces, not traces),
    'memory after a tenth, MB': (round(memory[0] / 1e6), True),
    'growth since, MB': (round(growth / 1e6, 1), growth < MOST_GROWTH),
    'longest /health, s': (round(seen.health, 2), seen.health < MOST_HEALTH),
    'end after SIGTERM, s': (round(seconds, 1), ended),
  }
  for name, count in sorted(seen.counts.items()):
    print(f'{name:32}{count:10,}')
  for name, (value, good) in checks.items():
    print(f'{name:32}{value:>10,}  {"" if good else "FAILED"}')
  for line in sorted(set(seen.wrong))[:20]:
    print(line)
  if args.json:
    facts = dict(minutes=args.minutes, clients=args.clients, date=time.strftime('%Y-%m-%d'),
                 machine=f'{os.cpu_count()} cores, clients included')  # fmt: skip
    values = {name: value for name, (value, _) in checks.items()}
    with open(args.json, 'a') as f:
      f.write(json.dumps(facts | values | {'counts': dict(seen.counts)}) + '\n')
  sys.exit(0 if all(good for _, good in checks.values()) else 1)


if __name__ == '__main__':
  main()
