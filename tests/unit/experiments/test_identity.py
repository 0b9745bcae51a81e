"""The identity of a run in its folder."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.datasets import DocumentFiles, SftFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.identity import (
  former_files,
  is_of,
  refuse_other_experiment,
  run_values,
  write_configuration,
)
from paxlite.programs.launch import build_experiment
from paxlite.run_data.run_data import RunData
from paxlite.training.train_data import TrainData


def test_a_folder_is_of_the_class_that_wrote_it_and_of_no_other(tmp_path):
  small = dict(ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1])
  assert not is_of(TinyGPT(), tmp_path)
  write_configuration(TinyGPT(**small), tmp_path)
  assert is_of(TinyGPT(MAX_STEPS=7), tmp_path)
  assert not is_of(GPT126M(**small), tmp_path)


class Chats(SftFiles, TinyGPT):
  """Small, with relative paths."""

  VOCAB_SIZE = 8192
  VOCAB_PATH = 'tokens.model'
  MAX_SEQ_LEN = 32
  PERCORE_BATCH_SIZE = 2
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]


class Documents(DocumentFiles, Chats):
  """The same with streams."""


def write(path, count):
  lines = [json.dumps(dict(inputs=f'{i} is', targets=' a.', text='b')) for i in range(count)]
  path.write_text('\n'.join(lines))


@pytest.fixture
def started_in(tmp_path, monkeypatch):
  """Returns the folder, which has data, in which a run is started; it is the current one."""
  folder = tmp_path / 'here'
  (folder / 'data').mkdir(parents=True)
  (folder / 'tokens.model').symlink_to(packaged.VOCAB)
  for name in ('data/a.jsonl', 'data/b.jsonl', 'e.jsonl', 'f.jsonl'):
    write(folder / name, 5)
  monkeypatch.chdir(folder)
  return folder


def test_relative_paths_of_a_run_are_those_of_the_folder_where_it_was_started(
  started_in, tmp_path, monkeypatch
):
  e = Chats(TRAIN_FILES=['data/*.jsonl', 'f.jsonl'], EVAL_FILES=['e.jsonl'], NUM_LAYERS=1)
  write_configuration(e, tmp_path)
  monkeypatch.chdir(tmp_path)
  name = f'{Chats.__module__}.Chats'
  found = build_experiment(name, [], {}, run_values(tmp_path))
  paths = [*found.TRAIN_FILES, *found.EVAL_FILES, found.VOCAB_PATH]
  names = ['data/*.jsonl', 'f.jsonl', 'e.jsonl', 'tokens.model']
  assert paths == [f'{started_in}/{name}' for name in names]
  refuse_other_experiment(found, tmp_path)
  with pytest.raises(UserError, match='EVAL_FILES'):
    refuse_other_experiment(found.replaced(EVAL_FILES=['g.jsonl']), tmp_path)
  (tmp_path / 'data.jsonl').write_text('{"step": 0, "batch": 0, "batch_size": 2}\n')
  assert RunData(str(tmp_path)).data_of(1).source.num_records == 15
  given = build_experiment(name, [], {'EVAL_FILES': 'e.jsonl'}, run_values(tmp_path))
  assert given.EVAL_FILES == ['e.jsonl']  # what a command names is in the current folder
  write_configuration(found, tmp_path)  # continued in another folder, and then by the first command
  monkeypatch.chdir(started_in)
  refuse_other_experiment(e, tmp_path)
  write_configuration(e, tmp_path)
  monkeypatch.chdir(tmp_path)
  file = tmp_path / 'experiment.json'  # that of an earlier version
  file.write_text(file.read_text().replace('started_in', 'other'))
  assert build_experiment(name, [], {}, run_values(tmp_path)).TRAIN_FILES == e.TRAIN_FILES


@pytest.mark.parametrize('cls', [Chats, Documents])
def test_files_that_are_added_are_refused_with_the_names_of_the_former_ones(
  started_in, tmp_path, cls
):
  import fiddle as fdl

  field = 'TRAIN_SOURCES' if cls is Documents else 'TRAIN_FILES'
  e = cls(**{field: ['data/*.jsonl']}, NUM_LAYERS=1)
  write_configuration(e, tmp_path)
  data = lambda: TrainData(fdl.build(e.train_input()), former=former_files(e, tmp_path))
  first = data()
  next(iter(first.input.train_batches(0, slice(0, 2))))
  metadata = first.metadata(1)()
  data().resume(1, metadata)
  write(started_in / 'data' / 'c.jsonl', 6)
  former = rf"'{field}=\[data/a.jsonl,data/b.jsonl\]' names the files of before"
  with pytest.raises(UserError, match=former):
    data().resume(1, metadata)
