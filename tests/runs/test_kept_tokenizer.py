"""A run is read, exported and continued with its own copy of its tokenizer."""

import json
import shutil
import sys

import numpy as np
import pytest

import paxlite
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer_copies import kept
from paxlite.experiments.datasets import SftFiles, TextFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.programs.launch import run_in
from paxlite.run_data.run_data import RunData
from tests.runs.test_finetune_command import SHORT, command, data, weights  # noqa: F401
from tests.support import runs


class OfText(TextFiles, TinyGPT):
  """A tiny model of text."""

  VOCAB_SIZE = 8192
  NUM_LAYERS = 1
  EVAL_INTERVAL_STEPS = 100


def trained(folder, vocab: str, steps: int = 2) -> None:
  """Trains a tiny model on text with a tokenizer."""
  text = folder.parent / 'text.txt'
  text.write_text('In the beginning was the word.\n' * 200)
  paxlite.train(OfText(TRAIN_FILES=[str(text)], VOCAB_PATH=vocab, MAX_STEPS=steps), folder)


@pytest.fixture
def vocab(tmp_path) -> str:
  (tmp_path / 'a').mkdir()
  shutil.copyfile(packaged.VOCAB, tmp_path / 'a' / 'mine.model')
  return str(tmp_path / 'a' / 'mine.model')


def test_a_run_is_read_with_the_tokenizer_that_it_was_trained_with(vocab, tmp_path):
  run = tmp_path / 'run'
  trained(run, vocab)
  own = run / 'tokenizer' / 'mine.model'
  assert kept(run) == own
  shutil.rmtree(tmp_path / 'a')
  assert paxlite.load(run).inference.tokenizer.path == str(own)
  assert run_in(str(run))['values']['VOCAB_PATH'] == str(own)  # evaluations and replays
  assert RunData(str(run)).tokenizer.path == str(own)
  assert RunData(str(run)).batch(1)['ids'].shape == (OfText().batch_size, 32)


def test_a_run_continues_with_its_own_tokenizer(vocab, tmp_path):
  trained(tmp_path / 'whole', vocab, 3)
  run = tmp_path / 'run'
  trained(run, vocab)
  shutil.rmtree(tmp_path / 'a')
  trained(run, vocab, 3)
  assert runs.losses(run) == runs.losses(tmp_path / 'whole')
  assert kept(run) is not None
  for step in (1, 3):  # the steps before it was gone, too
    assert RunData(str(run)).batch(step)['ids'].shape == (OfText().batch_size, 32)


def test_a_run_does_not_continue_with_another_tokenizer(vocab, tmp_path):
  run, other = tmp_path / 'run', tmp_path / 'other'
  trained(run, vocab)
  other.mkdir()
  shutil.copyfile(packaged.VOCAB, other / 'tokenizer.model')
  added = {'8192': {'content': '<new>', 'special': True}}
  config = {'tokenizer_class': 'LlamaTokenizer', 'added_tokens_decoder': added}
  (other / 'tokenizer_config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=r'is not the tokenizer that .*VOCAB_PATH=.*mine\.model'):
    trained(run, str(other), 3)
  assert kept(run) == run / 'tokenizer' / 'mine.model'


class OfChats(SftFiles, TinyGPT):
  """A tiny model of chats."""

  VOCAB_SIZE = 8192
  NUM_LAYERS = 1
  EVAL_INTERVAL_STEPS = 100


def test_what_has_changed_of_how_chats_are_encoded_is_named(tmp_path):
  (tmp_path / 'a').mkdir()
  shutil.copyfile(packaged.VOCAB, tmp_path / 'a' / 'tokenizer.model')
  template = tmp_path / 'a' / 'chat_template.jinja'
  written = '{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}'
  template.write_text(written)
  chat = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Yes'}]
  chats = tmp_path / 'chats.jsonl'
  chats.write_text(json.dumps({'messages': chat}) + '\n')
  of = lambda steps, **values: OfChats(
    TRAIN_FILES=[str(chats)], VOCAB_PATH=str(tmp_path / 'a'), MAX_STEPS=steps, **values
  )
  paxlite.train(of(2), tmp_path / 'run')
  template.write_text(written.replace(':', ';'))
  named = rf'but the chat template of {tmp_path}/a/tokenizer.model has changed since\. Put it back'
  with pytest.raises(UserError, match=named):
    paxlite.train(of(3), tmp_path / 'run')
  template.write_text(written)
  with pytest.raises(UserError, match=r'but CHAT_TEMPLATE has changed since\. Put it back'):
    paxlite.train(of(3, CHAT_TEMPLATE=written.replace(':', ';')), tmp_path / 'run')
  paxlite.train(of(3), tmp_path / 'run')


@pytest.mark.slow
def test_a_fine_tuned_run_needs_no_folder_of_its_base(weights, data, tmp_path):  # noqa: F811
  base, run = tmp_path / 'base', str(tmp_path / 'run')
  shutil.copytree(weights, base)
  words = ['finetune', str(base), *data, *SHORT, f'--folder={run}']
  command(*words)
  logits = paxlite.load(run).logits('alpha goes before')
  shutil.rmtree(base)
  model = paxlite.load(run)
  np.testing.assert_array_equal(model.logits('alpha goes before'), logits)
  command('generate', run, 'alpha goes before', '--max_new_tokens=2')
  assert 'eval eval at step 4: loss ' in command('eval', run)
  command('export', run, '--to=hf', f'--path={tmp_path / "exported"}')
  assert (tmp_path / 'exported' / 'tokenizer.model').is_file()
  out = command(*words, 'MAX_STEPS=5')
  assert list(runs.losses(run)) == [1, 2, 3, 4, 5], out
  words[words.index(f'--folder={run}')] = f'--folder={tmp_path / "new"}'
  result = runs.ended([sys.executable, '-m', 'paxlite', *words], runs.environment())
  assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
  assert f'{base} is not a folder' in result.stderr
