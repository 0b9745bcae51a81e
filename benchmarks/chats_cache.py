"""python benchmarks/chats_cache.py [--chats=1000000] [--compared=50000] [--rounds=3]

Measures the start of fine-tuning on chats of about 300 tokens: the first one, which tokenizes them
on all cores, and the second one up to its first batch, each a whole process with its workers; their
peak memory; and the padding of packed rows of 2,048. Then compares the tokens per second of first
starts, from the file to the cache, with `datasets.map(batched=True, num_proc=CORES)` of Hugging
Face, from the loaded dataset to its cache, in turn: with the ids of a chat alone, and with the mask
of what is learned, which paxlite always computes.
"""

import argparse
import contextlib
import json
import lzma
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
  "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
  "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = pathlib.Path('paxlite/data/packaged/king_james_bible.txt.xz')
_SEQ_LEN = 2048
_OPENED = """
import json, resource, time
import numpy as np
from paxlite.finetuning.chats.sft import SftRows
begun = time.perf_counter()
rows = SftRows([{file!r}], {vocab!r}, {seq_len}, 49152, chat_template={template!r},
               too_long='skip', cache={cache!r})
seconds = time.perf_counter() - begun
rows.read(np.arange(32) * 7 % len(rows))
tokens = int(rows._examples.length.sum())
print(json.dumps(dict(seconds=seconds, tokens=tokens, records=rows.num_records,
  padding=1 - int(rows.lengths.sum()) / (len(rows) * {seq_len}),
  memory_of_main_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)))
"""
_MAPPED = """
import json, time
import datasets
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file={vocab!r}, eos_token='<|im_end|>')
tokenizer.chat_template = {template!r}
data = datasets.load_dataset('json', data_files={file!r}, split='train', cache_dir={cache!r})

def encoded(batch):
  found = tokenizer.apply_chat_template(batch['messages'], tokenize=True, return_dict=True,
                                        return_assistant_tokens_mask={masks})
  return {{name: found[name] for name in ('input_ids', 'assistant_masks') if name in found}}

begun = time.perf_counter()
made = data.map(encoded, batched=True, num_proc={cores}, remove_columns=data.column_names)
seconds = time.perf_counter() - begun
tokens = sum(len(x) for x in made.with_format('numpy')['input_ids'])
print(json.dumps(dict(seconds=seconds, tokens=tokens)))
"""


def write_chats(path: pathlib.Path, texts: pathlib.Path, count: int) -> None:
  """Writes chats of one or two turns; their lengths are lognormal, about 300 tokens on average."""
  rng = random.Random(0)
  words = lzma.decompress(texts.read_bytes()).decode().split()

  def said(mean: float) -> str:
    length = max(3, round(rng.lognormvariate(0, 0.7) * mean))
    start = rng.randrange(len(words) - length)
    return ' '.join(words[start : start + length])

  with path.open('w') as f:
    for _ in range(count):
      turns = rng.choice([1, 1, 2])
      roles = [('user', 40), ('assistant', 95)] * turns
      messages = [dict(role=role, content=said(mean)) for role, mean in roles]
      f.write(json.dumps({'messages': messages}) + '\n')


@contextlib.contextmanager
def watched(process: subprocess.Popen) -> Iterator[list[float]]:
  """Yields a list that will hold the peak memory in MB of a process with its children (PSS)."""
  import psutil

  peak, over = [0.0], threading.Event()

  def look() -> None:
    while not over.wait(0.5):
      with contextlib.suppress(psutil.Error):
        tree = [psutil.Process(process.pid)]
        tree += tree[0].children(recursive=True)
        peak[0] = max(peak[0], sum(each.memory_full_info().pss for each in tree) / 1e6)

  thread = threading.Thread(target=look)
  thread.start()
  try:
    yield peak
  finally:
    over.set()
    thread.join()


def run(code: str) -> dict[str, float]:
  """Runs Python code that prints JSON; returns that, with the seconds and memory of the process."""
  begun = time.perf_counter()
  process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
  with watched(process) as peak:
    out, _ = process.communicate()
  if process.returncode:
    raise SystemExit(process.returncode)
  found: dict[str, float] = json.loads(out.splitlines()[-1])
  return found | {'process_seconds': time.perf_counter() - begun, 'memory_mb': peak[0]}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--vocab', required=True, help='a tokenizer.json, such as that of SmolLM2')
  parser.add_argument('--texts', type=pathlib.Path, default=TEXTS)
  parser.add_argument('--chats', type=int, default=1_000_000)
  parser.add_argument('--compared', type=int, default=50_000)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--json', help='write the result into this file')
  args = parser.parse_args()
  if min(args.chats, args.compared) <= 20_000:
    parser.error('20,000 chats or fewer are tokenized at each start, by one process')

  cores = len(os.sched_getaffinity(0))
  result: dict[str, object] = {'chats': args.chats, 'cores': cores, 'rounds': args.rounds}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'chats.jsonl'
    of = dict(file=str(file), vocab=args.vocab, template=TEMPLATE, seq_len=_SEQ_LEN, cores=cores)
    opened = lambda cache: run(_OPENED.format(**of, cache=f'{folder}/{cache}'))
    write_chats(file, args.texts, args.chats)
    result['megabytes'] = round(file.stat().st_size / 1e6)
    for name in ('first start', 'second start'):
      found = opened('whole')
      print(f'{name}: {found}', flush=True)
      result[name] = {k: round(x, 4) for k, x in found.items()}
    write_chats(file, args.texts, args.compared)
    rates: dict[str, list[float]] = {'paxlite': [], 'map, ids': [], 'map, ids and masks': []}
    for i in range(args.rounds):
      ours = opened(str(i))
      rates['paxlite'].append(ours['tokens'] / ours['seconds'])
      for masks in (False, True):
        code = _MAPPED.format(**of, cache=f'{folder}/{i}{masks}', masks=masks)
        theirs = run(code)
        name = 'map, ids and masks' if masks else 'map, ids'
        rates[name].append(theirs['tokens'] / theirs['seconds'])
        assert theirs['tokens'] == ours['tokens'], (theirs, ours)
  medians = {name: statistics.median(found) for name, found in rates.items()}
  result['compared chats'] = args.compared
  result['tokens a second'] = {name: round(rate) for name, rate in medians.items()}
  ratio = lambda name: round(medians['paxlite'] / medians[name], 2)
  result['ratios'] = {name: ratio(name) for name in medians if name != 'paxlite'}
  result |= {'date': time.strftime('%Y-%m-%d'), 'python': platform.python_version()}
  text = json.dumps(result, indent=2)
  print(text)
  if args.json:
    pathlib.Path(args.json).write_text(text + '\n')


if __name__ == '__main__':
  main()
