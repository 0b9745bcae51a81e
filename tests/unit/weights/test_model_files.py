"""Which files of a Hugging Face folder hold its weights, and what import refuses to open."""

import json
import os
import pathlib
import socket

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.data.tokenizer_copies import copy_tokenizer, tokenizer_files
from paxlite.weights.folder import IMPORTED_FROM
from paxlite.weights.huggingface import Safetensors, read_folder
from paxlite.weights.lora import named_base
from paxlite.weights.model_files import chosen

numpy = pytest.importorskip('safetensors.numpy')
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
A, B = 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'


@pytest.mark.parametrize(
  ('names', 'expected'),
  [
    ([SINGLE], [SINGLE]),
    ([SINGLE, INDEX, A, B], [SINGLE]),
    ([SINGLE, INDEX], [SINGLE]),
    ([SINGLE, 'consolidated.safetensors', 'pytorch_model.bin'], [SINGLE]),
    ([INDEX, A, B, 'stray.safetensors'], [A, B]),
    ([A, B], [A, B]),
    (['other.safetensors', 'pytorch_model.bin'], ['other.safetensors']),
  ],
)
def test_files_are_those_that_transformers_reads(names, expected):
  assert chosen('m', names, lambda: {'a': A, 'b': B})[0] == expected


@pytest.mark.parametrize(
  ('names', 'match'),
  [
    ([INDEX, A], f'm/{B} is missing: {INDEX} names it'),
    ([A], 'm holds 1 of 2 files'),
    ([A, B, 'stray.safetensors'], 'neither model.safetensors nor'),
    ([A, 'model-00001-of-00003.safetensors'], 'neither model.safetensors nor'),
    (['a.safetensors', 'b.safetensors'], 'a.safetensors, b.safetensors, and neither'),
    (['pytorch_model.bin'], r'convert its .bin files'),
    (['consolidated.00.pth'], '--from=meta'),
    (['m.gguf'], 'paxlite import FOLDER shows how to convert'),
  ],
)
def test_files_that_are_not_clear_are_refused(names, match):
  with pytest.raises(UserError, match=match):
    chosen('m', names, lambda: {'a': A, 'b': B})


def test_what_is_not_read_is_named(caplog):
  chosen('m', [SINGLE, A], dict)
  assert f'reading {SINGLE}, as transformers does, and not {A}' in caplog.text


def test_two_files_with_one_tensor_are_refused(tmp_path):
  numpy.save_file({'a': np.zeros(2, np.float32)}, tmp_path / A)
  numpy.save_file({'transformer.a': np.ones(2, np.float32)}, tmp_path / B)
  with pytest.raises(UserError, match=r'a appears twice: a of .*, and transformer.a of'):
    Safetensors(tmp_path)


@pytest.mark.parametrize('beside', [True, False])
def test_an_adapter_is_refused_by_name(tmp_path, beside):
  config = {'base_model_name_or_path': 'ann/base', 'peft_type': 'LORA'}
  (tmp_path / 'adapter_config.json').write_text(json.dumps(config))
  if beside:
    (tmp_path / 'config.json').write_text('{}')
  match = 'an adapter .* next to a model' if beside else 'import its base model, ann/base, first'
  with pytest.raises(UserError, match=match):
    read_folder(tmp_path)


@pytest.mark.parametrize('kind', ['fifo', 'socket', 'device'])
def test_special_files_are_refused_at_once(tmp_path, kind, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / SINGLE
  if kind == 'fifo':
    os.mkfifo(path)
  elif kind == 'device':
    path.symlink_to('/dev/zero')
  else:
    with socket.socket(socket.AF_UNIX) as s:
      s.bind(SINGLE)
  with pytest.raises(UserError, match='is not a file, it is a'):
    Safetensors(tmp_path)


def test_links_out_of_a_folder_are_not_copied(tmp_path):
  secret, folder = tmp_path / 'secret', tmp_path / 'model'
  secret.write_text('key')
  folder.mkdir()
  (folder / 'tokenizer_config.json').symlink_to(secret)
  with pytest.raises(UserError, match=r'tokenizer_config.json is a link out of its folder'):
    tokenizer_files(folder)
  (folder / 'tokenizer_config.json').unlink()
  (folder / 'real.json').write_text('{}')
  (folder / 'tokenizer.json').symlink_to('real.json')
  assert list(tokenizer_files(folder)) == ['tokenizer.json']
  explicit = tokenizer_files(pathlib.Path(folder / 'tokenizer.json'))
  assert explicit == {'tokenizer.json': folder / 'tokenizer.json'}
  os.mkfifo(folder / 'chat_template.jinja')
  with pytest.raises(UserError, match='it is a FIFO'):
    tokenizer_files(folder)


@pytest.mark.parametrize('named', ['', 'org/name', '/downloads/llama'])
def test_an_adapter_names_what_its_base_was_imported_from(named, tmp_path):
  def made(name: str, before: str, has_factors: bool = True, **more: str) -> str:
    (tmp_path / name / 'state').mkdir(parents=True)
    values = {'CHECKPOINT_RESTORE_PATH': before, 'USE_LORA': has_factors}
    found = {'experiment': 'a.B', 'values': values, **more}
    (tmp_path / name / 'experiment.json').write_text(json.dumps(found))
    return str(tmp_path / name)

  base = made('base', '', False, **({IMPORTED_FROM: named} if named else {}))
  run = made('b', made('a', base))
  assert named_base(run, '') == named_base(base, '') == named
  trained = made('sft', base, False)
  assert named_base(made('c', trained), '') == named_base(run, trained) == ''
  (tmp_path / 'base').rename(tmp_path / 'moved')
  assert named_base(run, '') == ''
  assert named_base(run, str(tmp_path / 'moved')) == named


def test_links_of_hugging_faces_cache_are_copied(tmp_path):
  blob, snapshot = tmp_path / 'blobs' / 'f00', tmp_path / 'snapshots' / 'main'
  blob.parent.mkdir()
  snapshot.mkdir(parents=True)
  blob.write_text('{}')
  (snapshot / 'tokenizer.json').symlink_to('../../blobs/f00')
  assert tokenizer_files(snapshot) == {'tokenizer.json': snapshot / 'tokenizer.json'}


@pytest.mark.parametrize('kind', ['llama', 'gemma', 'mistral', 'phi3'])
def test_a_copy_beside_a_config_begins_and_encodes_texts_as_its_source(kind, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': kind}))
  copy_tokenizer(pathlib.Path(packaged.VOCAB), tmp_path)
  source, copy = open_tokenizer(packaged.VOCAB), open_tokenizer(str(tmp_path))
  assert copy.start_ids == source.start_ids != []
  assert copy.eos_id == source.eos_id
  text = 'Once upon a time,\n there was'
  assert copy.encode(text) == source.encode(text)
