"""A run continues with the data that it was trained on, and with other data only if allowed."""

import dataclasses
import datetime
import json
import logging
import shutil

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.documents import DocumentSource
from paxlite.data.fingerprints import fingerprint
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.mixture import mixture_of
from paxlite.data.streams import StreamInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.data.text import TextRows
from paxlite.experiments.datasets import FlatTokens, SftFiles, TextFiles
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.identity import write_configuration
from paxlite.files.text_files import read_text
from paxlite.finetuning.chats.sft import SftRows
from paxlite.programs.first_start import as_begun, dated
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter
from paxlite.training import train_data
from paxlite.training.train_data import TrainData

TEXT = read_text(packaged.TEXTS[1])[:300_000]


def flat(path, format='memmap', last=249):
  shutil.rmtree(path, ignore_errors=True)
  writer = FlatTokensWriter(str(path), 'train', 8192, format)
  for document in [np.arange(1, 250)] * 99 + [np.arange(1, last + 1)]:
    writer.write(document, [len(document)])
  writer.close()


def write(folder, kind, changed):
  """Writes or changes the data of a kind; returns its input."""
  path = str(folder / 'data')
  match kind:
    case 'memmap' | 'seqax':
      flat(path, kind, 250 if changed else 249)
      source = FlatTokenRows(path, 'train', 32)
    case 'same size':
      flat(path)
      if changed:
        flat(path, last=248)
        writer = FlatTokensWriter(path, 'other', 8192)
        ids = np.concatenate([np.arange(1, 250)] * 100)[::-1]
        writer.write(ids, range(249, len(ids) + 1, 249))
        writer.close()
      source = FlatTokenRows(path, 'other' if changed else 'train', 32)
    case 'text':
      (folder / 'a.txt').write_text(('more of it' if changed else '') + TEXT)
      source = TextRows([str(folder / 'a.txt')], packaged.VOCAB, 32, 'train')
    case 'sft':
      records = [dict(inputs=f'number {i} is', targets=f' {i * i}.') for i in range(20 + changed)]
      (folder / 'a.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
      source = SftRows([str(folder / 'a.jsonl')], packaged.VOCAB, 32, 8192)
    case 'documents':
      (folder / 'a.jsonl').write_text('{"text": "a b c"}\n' * (3 + changed))
      return StreamInput(DocumentSource([str(folder / 'a.jsonl')], packaged.VOCAB, 8192), 32, 4)
    case 'synthetic':
      source = SyntheticRows(100 + changed, 32)
    case 'mixture':
      parts = [write(folder, part, changed) for part in ('text', 'documents')]
      return mixture_of([write(folder, 'synthetic', False), *parts], [1, 1, 1], 4)
  return RowInput(source, batch_size=4 + changed)


KINDS = ['memmap', 'seqax', 'same size', 'text', 'sft', 'documents', 'synthetic', 'mixture']


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_input_knows_its_data(tmp_path, kind):
  (tmp_path / 'elsewhere').mkdir()
  one = fingerprint(write(tmp_path, kind, changed=False))
  assert one is not None
  assert fingerprint(write(tmp_path / 'elsewhere', kind, changed=False)) == one
  assert fingerprint(write(tmp_path, kind, changed=True)) != one


class Unknown:
  """A source that a user defines."""

  max_token_id = 1
  name = 'of my own'

  def __len__(self):
    return 1


def test_an_input_of_ones_own_needs_no_fingerprint():
  assert fingerprint(RowInput(Unknown(), 1)) is None


SMALL = dict(
  VOCAB_SIZE=8192, MAX_SEQ_LEN=32, NUM_LAYERS=1, MODEL_DIMS=16, PERCORE_BATCH_SIZE=2,
  MAX_EVAL_BATCHES=1,
)  # fmt: skip


def experiment(folder, kind, max_steps):
  match kind:
    case 'memmap':
      mixin, values = FlatTokens, dict(DATASET_PATH=str(folder / 'data'), EVAL_SPLIT=None)
    case 'text':
      mixin, values = (
        TextFiles,
        dict(TRAIN_FILES=[str(folder / 'a.txt')], VOCAB_PATH=packaged.VOCAB),
      )
    case 'sft':
      mixin, values = (
        SftFiles,
        dict(TRAIN_FILES=[str(folder / 'a.jsonl')], VOCAB_PATH=packaged.VOCAB),
      )
  cls = type(f'Tiny{mixin.__name__}', (mixin, TinyGPT), {})
  return cls(**SMALL, **values, MAX_STEPS=max_steps)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['memmap', 'text', 'sft'])
def test_a_run_refuses_other_data_unless_told_to_take_it(tmp_path, kind, caplog):
  write(tmp_path, kind, changed=False)
  run = Run(experiment(tmp_path, kind, 2), tmp_path / 'run')
  train(run)
  longer = dataclasses.replace(run, experiment=experiment(tmp_path, kind, 4))
  write(tmp_path, kind, changed=True)
  before = {p: p.stat().st_mtime_ns for p in (tmp_path / 'run').rglob('*') if p.is_file()}
  with pytest.raises(
    UserError, match=r'is not the data of the checkpoint of step 2\b.*accept_changes'
  ):
    train(longer)
  after = {p: p.stat().st_mtime_ns for p in (tmp_path / 'run').rglob('*') if p.is_file()}
  assert {p.name for p in before if before[p] != after.get(p)} <= {'.lock'}
  train(run)  # the run is complete, so its data does not matter
  with caplog.at_level(logging.WARNING):
    train(dataclasses.replace(longer, accept_changes=True))
  assert 'the run continues with it, because of --accept_changes' in caplog.text
  assert (tmp_path / 'run' / 'checkpoints' / 'checkpoint_00000004').is_dir()
  train(dataclasses.replace(run, experiment=experiment(tmp_path, kind, 5)))  # the data is accepted


@pytest.mark.slow
def test_a_checkpoint_without_fingerprints_goes_on(tmp_path, monkeypatch):
  write(tmp_path, 'memmap', changed=False)
  run = Run(experiment(tmp_path, 'memmap', 2), tmp_path / 'run')
  with monkeypatch.context() as m:
    m.setattr(train_data, 'identity', lambda _: {})
    train(run)
  metadata = tmp_path / 'run' / 'checkpoints' / 'checkpoint_00000002' / 'data' / 'metadata'
  assert 'fingerprint' not in metadata.read_text()
  write(tmp_path, 'memmap', changed=True)
  train(dataclasses.replace(run, experiment=experiment(tmp_path, 'memmap', 3)))


def test_a_state_can_be_saved_after_its_data_vanished(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "some words of a document"}\n' * 9)
  data = TrainData(StreamInput(DocumentSource([str(path)], packaged.VOCAB, 8192), 8, 4))
  data.resume(0, {})
  next(iter(data.input.train_batches(0, slice(0, 4))))
  path.unlink()
  assert data.metadata(1)().keys() >= {'fingerprint', 'tokens'}


def chats(folder, template='{{ messages[1].content }}{{ eos_token }}', changed=False, **how):
  """Returns the input of a few chats, which `template` writes."""
  records = [
    {'messages': [dict(role='user', content='q'), dict(role='assistant', content=f'{i} is')]}
    for i in range(20 + changed)
  ]
  (folder / 'a.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  source = SftRows(
    [str(folder / 'a.jsonl')], packaged.VOCAB, 32, 8192, chat_template=template, **how
  )
  return TrainData(RowInput(source, 4))


def test_a_change_of_records_and_one_of_their_tokens_are_told_apart(tmp_path):
  metadata = chats(tmp_path).metadata(2)()
  chats(tmp_path).resume(2, metadata)
  other = '{{ messages[1].content }}.{{ eos_token }}'
  with pytest.raises(UserError, match=r'records are the same, but .* the chat template'):
    chats(tmp_path, other).resume(2, metadata)
  with pytest.raises(UserError, match='its contents have changed since'):
    chats(tmp_path, changed=True).resume(2, metadata)
  clock = "{{ strftime_now('%d %B') }}" + other
  dated = chats(tmp_path, clock, date='2024-02-29').metadata(2)()
  chats(tmp_path, clock, date='2024-02-29').resume(2, dated)
  with pytest.raises(UserError, match='CHAT_DATE'):
    chats(tmp_path, clock, date='2024-03-01').resume(2, dated)


def test_the_day_of_a_template_is_that_of_the_first_start(tmp_path):
  e = experiment(tmp_path, 'sft', 2).replaced(CHAT_TEMPLATE="{{ strftime_now('%d') }}")
  run = Run(e, tmp_path / 'run')
  today = datetime.date.today().isoformat()
  found = dated(run).experiment.CHAT_DATE
  assert found >= today
  begun = e.replaced(CHAT_DATE='2024-02-29', CHAT_THINKING=False)
  (tmp_path / 'run').mkdir()
  write_configuration(begun, tmp_path / 'run')
  assert dated(run).experiment.CHAT_DATE == '2024-02-29'
  assert dated(run).experiment.CHAT_THINKING is None  # so that the data are read as before
  assert as_begun(run).experiment.CHAT_THINKING is False
  stated = dataclasses.replace(run, experiment=e.replaced(CHAT_DATE='2024-03-01'))
  assert dated(as_begun(stated)).experiment.CHAT_DATE == '2024-03-01'
  plain = dataclasses.replace(run, experiment=e.replaced(CHAT_TEMPLATE='{{ bos_token }}'))
  assert dated(plain).experiment.CHAT_DATE == ''
  with pytest.raises(UserError, match='CHAT_DATE=tomorrow must be a day'):
    e.replaced(CHAT_DATE='tomorrow').validate()
