"""Records that are left out are gone from the batches, and nothing else of them changes."""

import json
import pathlib

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.base import RowInput
from paxlite.data.documents import DocumentSource
from paxlite.data.fingerprints import change, identity, newly_left_out
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.places import Place
from paxlite.data.streams import StreamInput
from paxlite.data.synthetic import SyntheticRows
from paxlite.data.text import TextRows
from paxlite.finetuning.chats.sft import SftRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows
from paxlite.run_data.left_out import read, without
from paxlite.run_data.origins import ORIGIN, Column, place_of, traced
from tests.unit.run_data.test_origins import made, write

STREAMS = ['documents .jsonl 1 stream', 'documents .csv 3 stream', 'documents .jsonl 3 packed']
ROWS = ['sft packed', 'sft alone', 'flat packed memmap', 'flat sequences memmap', 'text packed']


def sequence(batches) -> list[tuple[int, ...]]:
  """Returns the origins of all tokens in the order of the rows."""
  rows = [batch[ORIGIN].reshape(-1, len(Column)) for batch in batches]
  return [tuple(origin) for origin in np.concatenate(rows).tolist() if origin[0] >= 0]


def taken(data, count: int, start: int = 0) -> list:
  batches = traced(data).train_batches(start, slice(0, 8))
  return [next(batches) for _ in range(count)]


def file_of(folder, *names: str) -> str:
  path = folder / 'left_out.txt'
  path.write_text('# poisoned\n' + ''.join(f'{name}\n' for name in names))
  return str(path)


def name_of(data, key) -> str:
  place = place_of(data, key)
  return f'{place.source}:{place.record}'


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('kind', STREAMS)
def test_a_stream_passes_over_a_record_from_the_middle_of_it(tmp_path, kind):
  whole = made(tmp_path, kind)
  run = traced(whole)
  batches = run.train_batches(0, slice(0, 8))
  first = [next(batches) for _ in range(2)]
  position = run.position(2)
  rest = sequence([next(batches) for _ in range(12)])
  gone = rest[0][: Column.TOKEN]  # a stream is in the middle of it
  del first
  other = without(made(tmp_path, kind), file_of(tmp_path, name_of(whole, gone)))
  after = traced(other)
  after.seek(2, position)
  batches = after.train_batches(2, slice(0, 8))
  found = sequence([next(batches) for _ in range(8)])
  left = [token for token in rest if token[: Column.TOKEN] != gone]
  assert len(left) < len(rest)
  assert found == left[: len(found)]
  assert len(found) > 1000 or 'packed' in kind


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('kind', ROWS)
def test_what_is_left_out_of_rows_becomes_padding(tmp_path, kind):
  whole = made(tmp_path, kind)
  before = taken(whole, 12)
  keys = sorted({token[: Column.TOKEN] for token in sequence(before)})
  gone = keys[1], keys[-1]
  names = [name_of(whole, key) for key in gone]
  if kind.startswith('flat'):  # whose folder exists already
    again = RowInput(FlatTokenRows(str(tmp_path / 'flat'), 'train', 16, kind.split()[1]), 8)
  else:
    again = made(tmp_path, kind)
  other = without(again, file_of(tmp_path, *names))
  count = 0
  for one, two in zip(before, taken(other, 12), strict=True):
    is_gone = np.zeros(one['ids'].shape, bool)
    for key in gone:
      is_gone |= (one[ORIGIN][..., : Column.TOKEN] == key).all(-1)
    count += int(is_gone.sum())
    for name in one:
      np.testing.assert_array_equal(two[name][~is_gone], one[name][~is_gone])
      assert (two[name][is_gone] == (-1 if name == ORIGIN else 0)).all()
  assert count


def test_a_mixture_leaves_records_of_its_parts_out(tmp_path):
  whole = made(tmp_path, 'mixture')
  keys = sorted({token[: Column.TOKEN] for token in sequence(taken(whole, 20))})
  gone = [next(key for key in keys if key[0] == part) for part in range(3)]
  path = file_of(tmp_path, *(name_of(whole, key) for key in gone))
  without(whole, path)
  found = {token[: Column.TOKEN] for token in sequence(taken(whole, 20))}
  assert found.isdisjoint(gone)
  assert len(found) >= len(keys) - 10


def test_all_blocks_of_a_line_are_left_out(tmp_path):
  (tmp_path / 'line.txt').write_text(' '.join(f'word {i} is here.' for i in range(400)))
  (tmp_path / 'other.txt').write_text('\n\n'.join(f'line {i} is there.' for i in range(200)))
  files = [str(tmp_path / name) for name in ('line.txt', 'other.txt')]
  data = RowInput(TextRows(files, packaged.VOCAB, 32, 'train', 'packed'), 8)
  blocks = [name_of(data, (0, 0, 0, i)) for i in range(data.source.num_documents)]
  assert blocks.count(f'{files[0]}:1') > 5
  without(data, file_of(tmp_path, f'{files[0]}:1'))
  assert data.source.left_out == {i for i, name in enumerate(blocks) if name == f'{files[0]}:1'}
  found = {token[Column.DOCUMENT] for token in sequence(taken(data, 20))}
  assert found.isdisjoint(data.source.left_out)
  assert found


def test_it_is_part_of_the_identity_of_the_data(tmp_path):
  plain = identity(made(tmp_path, 'sft packed'))
  name = str(tmp_path / 'sft.jsonl')
  one = identity(without(made(tmp_path, 'sft packed'), file_of(tmp_path, f'{name}:1')))
  two = identity(without(made(tmp_path, 'sft packed'), file_of(tmp_path, f'{name}:2', f'{name}:1')))
  assert 'left_out' not in plain
  assert {k: one[k] for k in plain} == plain
  assert [newly_left_out(*pair) for pair in ((one, plain), (two, one), (two, plain))] == [1, 1, 2]
  assert change(one, plain) == change(two, one) == change(two, two) == ''
  for now, before in ((plain, one), (one, two), (plain, two)):
    assert change(now, before).startswith('LEAVE_OUT no longer names all')


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize('kind', ['sft', 'text', 'documents'])
def test_files_of_one_name_have_other_checksums(tmp_path, kind):
  def data(folder):
    files = [str(tmp_path / folder / name) for name in ('one/a.txt', 'two/a.txt')]
    for i, file in enumerate(files):
      pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
      texts = [f'{i} and {n} are here.' for n in range(300)]
      records = [{'prompt': text, 'completion': text, 'text': text} for text in texts[:5]]
      pathlib.Path(file).write_text('\n\n'.join(texts))
      write(pathlib.Path(file).with_suffix('.jsonl'), records)
    if kind == 'text':
      return files, RowInput(TextRows(files, packaged.VOCAB, 32, 'all', 'packed'), 8)
    files = [file.replace('.txt', '.jsonl') for file in files]
    if kind == 'sft':
      return files, RowInput(SftRows(files, packaged.VOCAB, 48, 8192), 2)
    return files, StreamInput(DocumentSource(files, packaged.VOCAB, 8192), 48, 2, 'packed')

  found = []
  for folder, number in (('here', 0), ('here', 1), ('there', 1)):
    files, each = data(folder)
    name = f'{files[number]}:1'
    found.append(identity(without(each, file_of(tmp_path, name))))
  assert found[1] == found[2]
  assert change(found[1], found[0]).startswith('LEAVE_OUT no longer names all')


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('kind', ['sft packed', 'text packed', 'documents .jsonl 1 stream'])
def test_two_spellings_of_a_record_are_one_record(tmp_path, kind):
  name = name_of(made(tmp_path, kind), (0, 0, 0, 0))
  file, _, number = name.rpartition(':')
  (tmp_path / 'link').symlink_to(file)
  spelled = [f'{tmp_path}/link:{number}', name, f'{tmp_path}/../{tmp_path.name}/link:{number}']
  assert len(read(file_of(tmp_path, *spelled))) == 1
  plain = identity(without(made(tmp_path, kind), file_of(tmp_path, name)))
  assert identity(without(made(tmp_path, kind), file_of(tmp_path, *spelled))) == plain
  assert len(plain['left_out']) == 1
  elsewhere = f'{pathlib.Path(file).name}:{number}'  # relative to the folder of the data
  assert identity(without(made(tmp_path, kind), file_of(tmp_path, elsewhere))) == plain


def test_a_name_may_look_like_a_record(tmp_path):
  file = write(tmp_path / 'a:1,b:2.jsonl', [{'text': f'{i} is here'} for i in range(9)])
  data = StreamInput(DocumentSource([file], packaged.VOCAB, 8192), 48, 2, 'packed')
  assert read(file_of(tmp_path, f'{file}:3'))[0] == Place(file, 3)
  without(data, file_of(tmp_path, f'{file}:3'))
  assert data.source.datasets[0].left_out == {f'{file}:3'}
  with pytest.raises(UserError, match='a:1 is not a record of'):
    without(data, file_of(tmp_path, f'{tmp_path}/a:1'))


def test_a_stream_of_which_all_is_left_out_says_so(tmp_path):
  file = write(tmp_path / 'docs.jsonl', [{'text': f'{i} is here'} for i in range(9)])
  data = StreamInput(DocumentSource([file], packaged.VOCAB, 8192), 48, 2, 'packed')
  without(data, file_of(tmp_path, *(f'{file}:{i + 1}' for i in range(9))))
  with pytest.raises(UserError, match='too small, or LEAVE_OUT names too many of its records'):
    next(data.train_batches(0, slice(0, 2)))


@pytest.mark.parametrize('kind', ['sft packed', 'text packed'])
def test_something_must_be_left(tmp_path, kind):
  data = made(tmp_path, kind)
  names = [name_of(data, (0, 0, 0, i)) for i in range(data.source.num_documents)]
  with pytest.raises(UserError, match=r'LEAVE_OUT names all records of '):
    without(data, file_of(tmp_path, *names))


@pytest.mark.parametrize(
  ('kind', 'name', 'why'),
  [
    ('flat stream memmap', 'flat/train:3', 'join texts without a border'),
    ('text stream', 'a.txt:1', 'PACKED_INPUT=False'),
    ('sft packed', 'sft.jsonl:32', r'sft.jsonl:32 is not a record of .*sft.jsonl: name a record'),
    ('documents .jsonl 1 stream', 'other.jsonl:1', 'other.jsonl:1 is not a record of'),
  ],
)
def test_what_cannot_be_left_out_exactly_is_refused(tmp_path, kind, name, why):
  with pytest.raises(UserError, match=why):
    without(made(tmp_path, kind), file_of(tmp_path, f'{tmp_path}/{name}'))


def test_pairs_and_random_tokens_are_refused(tmp_path):
  record = {'prompt': 'a?', 'chosen': ' b', 'rejected': ' c'}
  path = write(tmp_path / 'pairs.jsonl', [record] * 3)
  pairs = RowInput(PreferenceRows([path], packaged.VOCAB, 16, 8192), 1)
  with pytest.raises(UserError, match='are compared with each other'):
    without(pairs, file_of(tmp_path, f'{path}:1'))
  with pytest.raises(UserError, match='its texts are not records'):
    without(RowInput(SyntheticRows(9, 4), 1), file_of(tmp_path, f'{path}:1'))


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    ('# nothing\n', 'names no record to leave out'),
    ('a.jsonl\n', r'left_out.txt:1 is not FILE:RECORD, as corpus.jsonl:17: a.jsonl'),
    ('a.jsonl:1\n\na.jsonl:-1\n', 'left_out.txt:3 is not FILE:RECORD'),
    ('', 'is empty'),
    (json.dumps({'a': 'b'}), 'is not FILE:RECORD'),
  ],
)
def test_a_file_that_names_no_records_is_refused(tmp_path, text, why):
  (tmp_path / 'left_out.txt').write_text(text)
  with pytest.raises(UserError, match=why):
    read(str(tmp_path / 'left_out.txt'))
  with pytest.raises(UserError, match=r'nowhere\.txt'):
    read(str(tmp_path / 'nowhere.txt'))
