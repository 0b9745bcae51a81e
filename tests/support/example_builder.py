"""Processes that tokenize examples into a cache."""

import pathlib
import subprocess
import sys

TEMPLATE = (
  '{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}'
  '{% if add_generation_prompt %}[assistant]\n{% endif %}'
)
_CODE = """
import time
from paxlite.data import packaged
from paxlite.finetuning.chats import example_files
from paxlite.finetuning.chats.sft import SftRows
slow, cores = False, 1
{before}
example_files._first.__defaults__, example_files._BLOCK_RECORDS = (20, 1 << 25), 7
example_files.usable_cores = lambda: cores
write, calls = example_files.write_blocks, []

def counted(writer, blocks):
  calls.append(1)
  time.sleep(1)
  def slowly():
    for block in blocks:
      yield block
      time.sleep(60 * slow)
  return write(writer, slowly())

example_files.write_blocks = counted
rows = SftRows([{file!r}], packaged.VOCAB, 128, 8192, chat_template={template!r}, cache={cache!r},
               skip_unreadable=True, too_long='skip')
print(rows.tokens_fingerprint, len(calls))
"""


def code(file: str, cache: pathlib.Path, before: str = '') -> str:
  return _CODE.format(before=before, file=file, template=TEMPLATE, cache=str(cache))


def started(file: str, cache: pathlib.Path, before: str = '') -> subprocess.Popen:
  """Starts a process that prints a fingerprint, and how often it has tokenized the file."""
  command = [sys.executable, '-c', code(file, cache, before)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
