"""Files of prompts, and the commands that continue text."""

import json
import signal
import subprocess
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.llama import LLaMA
from tests.support import runs


class Speaker(Synthetic, LLaMA):
  """Random weights with a tokenizer; the text is nonsense, but always the same."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 32
  HIDDEN_DIMS = 48
  VOCAB_SIZE = 8192
  VOCAB_PATH: str = packaged.VOCAB
  MAX_SEQ_LEN = 64
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False
  PERCORE_BATCH_SIZE = 2
  MAX_STEPS = 1
  DECODE_BATCH_SIZE = 2
  MAX_DECODE_STEPS = 6


CONFIG = 'tests.unit.generation.test_decoding.Speaker'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('speaker')
  runs.run(folder, config=CONFIG)
  return folder


def prompts(tmp_path, count: int = 7) -> str:
  path = tmp_path / 'prompts.jsonl'
  lines = [json.dumps(dict(inputs='And it came to pass ' * (i % 3 + 1), n=i)) for i in range(count)]
  path.write_text('\n'.join(lines))
  return f"--fdl.DECODE_FILES=['{path}']"


@pytest.mark.exhaustive
def test_a_file_of_prompts_and_an_interrupted_one(trained, tmp_path):
  """Finished prompts are not decoded again after a kill. The same holds on 8 devices."""
  import shutil

  folder = tmp_path / 'run'
  shutil.copytree(trained, folder)
  flag = prompts(tmp_path)
  runs.run(folder, '--mode=decode', flag, config=CONFIG)
  whole = (folder / 'decoded_00000001.jsonl').read_text()
  records = [json.loads(line) for line in whole.splitlines()]
  assert [r['n'] for r in records] == list(range(7))
  assert all(r['prediction'] for r in records)

  (folder / 'decoded_00000001.jsonl').unlink()
  partial = folder / 'decoded_00000001.jsonl.partial'
  process = subprocess.Popen(
    runs.command(folder, '--mode=decode', flag, config=CONFIG),
    cwd=runs.ROOT, env=runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  while process.poll() is None and not (partial.exists() and partial.stat().st_size):
    time.sleep(0.002)
  process.send_signal(signal.SIGKILL)
  process.wait()
  if partial.exists():
    with partial.open('a') as f:
      f.write('{"prompt": 5, "predi')  # like a kill during a write
  result = runs.run(folder, '--mode=decode', flag, config=CONFIG)
  assert (folder / 'decoded_00000001.jsonl').read_text() == whole
  assert '7 prompts continued' in result.stdout
  assert '7 of them now' not in result.stdout
  assert not partial.exists()
  again = runs.run(folder, '--mode=decode', flag, '--fdl.TOP_K=3', config=CONFIG, code=2)
  assert 'was decoded with other settings: TOP_K 0 → 3' in again.stderr
  prompts(tmp_path, count=1)
  again = runs.run(folder, '--mode=decode', flag, config=CONFIG, code=2)
  assert 'was decoded with other settings: prompts ' in again.stderr
  prompts(tmp_path)

  (folder / 'decoded_00000001.jsonl').unlink()
  runs.run(
    folder, '--mode=decode', flag, '--fdl.ICI_MESH_SHAPE=[1,4,2]', '--fdl.PERCORE_BATCH_SIZE=0.5',
    config=CONFIG, devices=8,
  )  # fmt: skip
  assert (folder / 'decoded_00000001.jsonl').read_text() == whole


@pytest.mark.slow
def test_generate_streams_the_same_text(trained, tmp_path):
  runs_as = lambda *flags: runs.module(
    'paxlite', 'generate', f'--checkpoint={trained}', *flags,
    '--import=tests.unit.generation.test_decoding', code=None,
  )  # fmt: skip
  result = runs_as('--prompt=And it came to pass ', '--max_new_tokens=6')
  assert result.returncode == 0, result.stderr
  from paxlite.generation.inference import load_checkpoint

  inference = load_checkpoint(str(trained))
  ids = inference.encode('And it came to pass ')
  expected = inference.engine().continuations([ids], 6)[0]
  assert result.stdout == inference.tokenizer.decode(expected) + '\n'

  for flags, message in (
    ([], 'error: PROMPT is missing'),
    (['--prompt=a', '--system=b'], 'error: --system needs --chat'),
    (['--prompt=a', '--top_p=2'], 'error: top_p=2 must be above 0'),
    (['--prompt=' + 'word ' * 100], 'leaves no room for a new token'),
    (['--prompt=a', '--chat'], 'has no chat template'),
    (['--prompt=a', '--tokenizer=/nowhere'], 'is not a file'),
  ):
    result = runs_as(*flags)
    assert result.returncode == 2, flags
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_tokenizer_of_another_model(trained, tmp_path):
  from paxlite.data.tokenizer import check_vocabulary

  tokenizer = open_tokenizer(packaged.VOCAB)
  for size in (8000, 32000):
    with pytest.raises(UserError, match="it is another model's tokenizer"):
      check_vocabulary(tokenizer, size)
  check_vocabulary(tokenizer, 8320)


@pytest.mark.slow
def test_other_weights_do_not_mix_with_what_was_decoded(trained, tmp_path):
  flags = [prompts(tmp_path, 2), f'--fdl.CHECKPOINT_RESTORE_PATH={trained}']
  runs.run(tmp_path / 'run', '--mode=decode', *flags, config=CONFIG)
  other = tmp_path / 'other'
  runs.run(other, '--fdl.SEED=9', config=CONFIG)
  flags[1] = f'--fdl.CHECKPOINT_RESTORE_PATH={other}'
  result = runs.run(tmp_path / 'run', '--mode=decode', *flags, config=CONFIG, code=2)
  assert 'was decoded with other settings: weights ' in result.stderr


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
  ('record', 'match'),
  [
    (dict(inputs='a', prediction='b'), 'already has a "prediction"'),
    (dict(text='a'), 'has neither'),
    (dict(messages=[]), '"messages" must be a list'),
    (
      dict(messages=[dict(role='user', content=None)]),
      'the message of the user has no text "content"',
    ),
    (dict(messages=[dict(role='user', content='a')]), 'has no chat template'),
  ],
)
def test_a_bad_prompt_is_named(record, match, trained, tmp_path):
  from paxlite.eval.decoding import read_prompts
  from paxlite.generation.inference import load_checkpoint

  path = tmp_path / 'p.jsonl'
  path.write_text(json.dumps(dict(inputs='a', index=3)) + '\n' + json.dumps(record) + '\n')
  with pytest.raises(UserError, match=rf'p\.jsonl:2.*{match}'):
    read_prompts([str(path)], load_checkpoint(str(trained)))


def test_decode_without_prompts_or_weights(trained, tmp_path):
  result = runs.run(tmp_path / 'new', '--mode=decode', prompts(tmp_path), config=CONFIG, code=2)
  assert 'holds no checkpoint: train first' in result.stderr
  result = runs.run(trained, '--mode=decode', config=CONFIG, code=2)
  assert 'DECODE_FILES' in result.stderr
