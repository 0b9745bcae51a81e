"""The copy of a tokenizer that a run keeps in its folder."""

import json
import pathlib
import shutil

import pytest

from paxlite.data import packaged, tokenizer_copies
from paxlite.data.tokenizer import open_tokenizer
from paxlite.data.tokenizer_copies import differences, has_other_tokens, keep, kept

TEXT = 'Once upon a time,\n there was'
NAMES = ['text8k.model', 'tokenizer.model', 'folder']


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
  folder = tmp_path / 'run'
  folder.mkdir()
  return folder


def original(folder: pathlib.Path, name: str = 'folder') -> str:
  """Returns the path of a tokenizer, by the name of its file, or by its folder."""
  folder.mkdir()
  file = folder / ('tokenizer.model' if name == 'folder' else name)
  shutil.copyfile(packaged.VOCAB, file)
  (folder / 'chat_template.jinja').write_text('{{ messages[0].content }}')
  return str(folder if name == 'folder' else file)


@pytest.mark.parametrize('class_of', ['', 'tokenizer_config.json', 'config.json'])
@pytest.mark.parametrize('name', NAMES)
def test_a_copy_encodes_as_its_original(name, class_of, run, tmp_path):
  path = original(tmp_path / 'a', name)
  said = {'tokenizer_config.json': {'tokenizer_class': 'LlamaTokenizer', 'add_eos_token': True},
          'config.json': {'model_type': 'llama'}}  # fmt: skip
  if class_of:
    (tmp_path / 'a' / class_of).write_text(json.dumps(said[class_of]))
  source = open_tokenizer(path)
  keep(path, run)
  copy = kept(run)
  assert copy is not None
  assert differences(path, str(copy)) == []
  shutil.rmtree(tmp_path / 'a')
  again = open_tokenizer(str(copy))
  assert type(again) is type(source)
  assert again.encode(TEXT) == source.encode(TEXT)
  assert (again.start_ids, again.eos_id) == (source.start_ids, source.eos_id)
  assert (run / 'tokenizer' / 'chat_template.jinja').is_file()


def test_a_tokenizer_that_is_named_by_its_file_is_not_confused_with_another_one(run, tmp_path):
  path = original(tmp_path / 'a', 'tokenizer.model')
  (tmp_path / 'a' / 'tokenizer.json').write_text('{}')
  keep(path, run)
  assert kept(run) == run / 'tokenizer' / 'tokenizer.model'


def test_the_copy_changes_with_its_original_alone(run, tmp_path, monkeypatch):
  assert kept(run) is None
  path = original(tmp_path / 'a')
  keep(path, run)
  before = (run / 'tokenizer').stat()
  assert before.st_mode == run.stat().st_mode
  written = run.stat().st_mtime_ns
  keep(path, run)
  keep(str(kept(run)), run)  # a run that continues with its own copy
  assert (run / 'tokenizer').stat().st_ino == before.st_ino
  assert run.stat().st_mtime_ns == written
  (tmp_path / 'a' / 'chat_template.jinja').write_text('other')
  (run / '.tokenizer-killed').mkdir()  # what a killed process had begun
  assert differences(path, str(kept(run))) == [f'the chat template of {path}/tokenizer.model']
  assert not has_other_tokens(path, str(kept(run)))

  def fails(*_: object) -> None:
    raise OSError('No space left on device')

  with monkeypatch.context() as m:
    m.setattr(tokenizer_copies, 'copy_tokenizer', fails)
    with pytest.raises(OSError, match='No space'):
      keep(path, run)
  assert (run / 'tokenizer' / 'chat_template.jinja').read_text() != 'other'
  keep(path, run)
  assert (run / 'tokenizer' / 'chat_template.jinja').read_text() == 'other'
  assert sorted(p.name for p in run.iterdir()) == ['tokenizer', 'tokenizer.before']


def test_a_folder_of_the_user_is_not_lost(run, tmp_path):
  """The folder of a run may be a project's, which has a folder tokenizer/ already."""
  path = original(tmp_path / 'a')
  for text in ('corpus', 'another'):
    shutil.rmtree(run / 'tokenizer', ignore_errors=True)
    (run / 'tokenizer' / 'data').mkdir(parents=True)
    (run / 'tokenizer' / 'data' / 'a.txt').write_text(text)
    keep(path, run)
    assert differences(path, str(kept(run))) == []
  left = sorted(run.glob('tokenizer.*'))
  assert [p.name for p in left] == ['tokenizer.before', 'tokenizer.before.1']
  assert [(p / 'data' / 'a.txt').read_text() for p in left] == ['corpus', 'another']


def test_other_tokens_are_told(tmp_path):
  path = original(tmp_path / 'a')
  added = {'8192': {'content': '<new>', 'special': True}}
  config = {'tokenizer_class': 'LlamaTokenizer', 'added_tokens_decoder': added}
  shutil.copytree(tmp_path / 'a', tmp_path / 'b')
  (tmp_path / 'b' / 'tokenizer_config.json').write_text(json.dumps(config))
  assert has_other_tokens(str(tmp_path / 'b'), path)
  assert differences(str(tmp_path / 'b'), path) == [f'the tokenizer {tmp_path}/b/tokenizer.model']
