"""Files of records as people have them: JSON in several layouts, tables, and marks of Windows."""

import gzip
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from paxlite.config.attributes import parse
from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.data import packaged, parquet_bounds, record_files
from paxlite.data.documents import DocumentSource
from paxlite.data.records import open_records, read_records
from paxlite.data.streams import StreamInput
from paxlite.experiments.datasets import SftFiles
from paxlite.finetuning.chats.sft import SftRows

RECORDS = [{'inputs': f'a, "{i}"\n\nß;', 'targets': f' {i}\t.'} for i in range(3)]
PRETTY = [json.dumps(r, indent=2, ensure_ascii=False) for r in RECORDS]


def cells(*row: str) -> str:
  return ','.join('"' + cell.replace('"', '""') + '"' for cell in row)


TABLE = 'inputs,targets\r\n' + '\r\n'.join(cells(*r.values()) for r in RECORDS) + '\r\n\r\n'
CONTENTS = {
  'lines.json': '\n'.join(map(json.dumps, RECORDS)),
  'lines.jsonl': '\r\n'.join(map(json.dumps, RECORDS)) + '\r\n',
  'one_line.json': json.dumps(RECORDS), 'list.json': ' \n' + json.dumps(RECORDS, indent=1) + '\n',
  'objects.json': '\n'.join(PRETTY) + '\n', 'objects_on_lines.json': ''.join(PRETTY),
  'table.csv': TABLE, 'semicolons.csv': TABLE.replace(',targets', ';targets').replace('","', '";"'),
  'tabs.tsv': TABLE.replace(',targets', '\ttargets').replace('","', '"\t"'),
}  # fmt: skip


def batch(path) -> dict[str, np.ndarray]:
  return SftRows([str(path)], packaged.VOCAB, 64, 8192).read(np.array([0]))


@pytest.mark.parametrize('name', CONTENTS)
def test_every_layout_gives_the_same_rows(tmp_path, name):
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, RECORDS)))
  data = CONTENTS[name].encode()
  contents = {name: data, f'bom_{name}': b'\xef\xbb\xbf' + data, f'{name}.gz': gzip.compress(data)}
  contents[f'{name}.zst'] = zstandard.compress(data)
  expected = batch(tmp_path / 'a.jsonl')
  for file, content in contents.items():
    (tmp_path / file).write_bytes(content)
    assert [r for _, r in read_records(str(tmp_path / file))] == RECORDS, file
    for key, value in batch(tmp_path / file).items():
      np.testing.assert_array_equal(value, expected[key], err_msg=file)


@pytest.mark.parametrize('name', CONTENTS)
def test_reading_can_begin_at_any_record(tmp_path, name):
  (tmp_path / name).write_text(CONTENTS[name], newline='')
  source = open_records(str(tmp_path / name))
  whole = list(source.read(0))
  assert source.done == source.size
  for start in range(4):
    assert list(open_records(str(tmp_path / name)).read(0, start)) == whole[start:]


@pytest.mark.parametrize('name', ['list.json', 'objects.json', 'table.csv'])
def test_records_over_several_lines_are_located_by_their_first(tmp_path, name):
  path = tmp_path / name
  path.write_text(CONTENTS[name], newline='')
  lines = CONTENTS[name].splitlines()
  number = {'list.json': 7, 'objects.json': 5, 'table.csv': 5}[name]
  places = [place for place, _ in read_records(str(path))]
  assert places[1] == f'{path}:{number}'
  assert lines[number - 1].strip()[:1] in ('{', '"')


@pytest.mark.parametrize(
  ('name', 'content', 'match'),
  [
    ('a.json', b'[{"a": 1},\n {"a": 2}', r'a.json:2 is not JSON: after an object'),
    ('a.json', b'[{"a": 1}\n {"a": 2}]', r'a.json:2 is not JSON: after an object'),
    ('a.json', b'[{"a": 1},\n', r'a.json:2 is not JSON: Expecting value'),
    ('a.json', b'[{"a": 1}]\n{"a": 2}', r'a.json:1 is not JSON: after an object'),
    ('a.json', b'[{"a": 1},\n 3]', r'a.json:2 is not a JSON object'),
    ('a.json', b'[{"a":\n "\\ud800"}]', r'a.json:1 has half of a surrogate pair'),
    ('a.json', b'[{"a":\n' + b'[' * 200 + b']' * 200 + b'}]', r'a.json:1 is not JSON: lists'),
    ('a.json', b'[{"a":\n' + b'[' * 200_000, r'a.json:1 is not JSON'),
    ('a.json', b'[{"a":\n "\xff"}]', r'a.json:2 is not UTF-8'),
    ('a.json', b'{\n"a": 1}\n{"a": 1\n', r'a.json:4 is not JSON'),
    ('a.json', b'', 'a.json is empty'),
    ('a.csv', b'', 'a.csv is empty'),
    ('a.csv', b'a,b\n1,2\n1,2,3\n', r'a.csv:3 has 3 columns and the first line names 2'),
    ('a.csv', b'a,b\n1,"2\n', r'a.csv:2 is not CSV: unexpected end of data'),
    ('a.csv', b'a,a\n1,2\n', r'a.csv:1 must name the columns'),
    ('a.csv', b'a,\n1,2\n', r'a.csv:1 must name the columns'),
    ('a.csv', b'a,b\n1,2\n1,\xe4\n', r'a.csv:3 is not UTF-8 \(byte 2 of the line\)'),
    ('a.csv.gz', gzip.compress(b'a,b\n' * 99, mtime=0)[:-9], r'a.csv.gz cannot be read'),
    ('a.json.gz', b'[', r'a.json.gz cannot be read'),
  ],
)  # fmt: skip
def test_a_damaged_file_is_one_error(tmp_path, name, content, match):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=match):
    list(read_records(str(tmp_path / name)))


def parquet(path, table, **options):
  pq.write_table(table, path, compression='zstd', **options)
  return str(path)


def test_a_small_parquet_file_of_huge_rows_is_read_in_little_memory(tmp_path, monkeypatch):
  """Each of its rows names one long text of a dictionary."""
  monkeypatch.setattr(parquet_bounds, 'BATCH_BYTES', 16 << 20)
  long = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ['x' * 1_000_000])
  nested = pa.ListArray.from_arrays(pa.array(range(0, 100_001, 10), pa.int32()), long)
  for name, column in (('flat', long), ('nested', nested)):
    path = parquet(tmp_path / f'{name}.parquet', pa.table({'text': column}), store_schema=False)
    assert pathlib.Path(path).stat().st_size < 10_000
    before = pa.total_allocated_bytes()
    found = zip(range(3), read_records(path), strict=False)
    for _, (_, record) in found:
      assert len(record['text']) == {'flat': 1_000_000, 'nested': 10}[name]
      assert pa.total_allocated_bytes() < before + 2 * parquet_bounds.BATCH_BYTES


def test_a_row_of_parquet_that_is_no_record_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(record_files, 'BATCH_BYTES', 1000)
  table = pa.table({'text': ['x', 'y' * 2000]})
  path = parquet(tmp_path / 'a.parquet', table)
  records = read_records(path)
  assert next(records)[1] == {'text': 'x'}
  with pytest.raises(UserError, match=r'a\.parquet has a row of more than .* cut it into several'):
    next(records)


def test_lists_of_parquet_that_may_not_fit_in_memory_are_refused(tmp_path, monkeypatch):
  path = parquet(tmp_path / 'a.parquet', pa.table({'ids': [[7] * 100_000], 'n': [1]}))
  assert len(next(read_records(path))[1]['ids']) == 100_000
  monkeypatch.setattr(host_memory, 'available', lambda: 1_000_000)
  with pytest.raises(UserError, match=r'row group 0 has 100,000 values in its lists.*smaller row'):
    next(read_records(path))


@pytest.mark.parametrize('encoding', ['DELTA_BYTE_ARRAY', 'PLAIN', None])
def test_parquet_in_many_row_groups_and_batches(tmp_path, monkeypatch, encoding):
  monkeypatch.setattr(parquet_bounds, 'BATCH_BYTES', 20_000)
  rows = [
    {'text': f'{i} ' * (i % 50), 'n': i, 'm': [{'role': 'user', 'content': f'{i}'}] * (i % 4)}
    for i in range(1000)
  ]
  options = {'use_dictionary': False} if encoding else {}
  options |= {'column_encoding': {'text': encoding}} if encoding else {}
  path = parquet(tmp_path / 'a.parquet', pa.Table.from_pylist(rows), row_group_size=300, **options)
  assert [r for _, r in read_records(path)] == rows
  source = open_records(path)
  assert list(source.read(0, 450)) == list(enumerate(rows))[450:]
  assert source.done == source.size == 1000


def test_rows_of_a_table_are_bounded(tmp_path, monkeypatch):
  monkeypatch.setattr(record_files, '_ROW_CHARS', 1000)
  (tmp_path / 'a.csv').write_text('text,n\n' + 'x,1\n' * 1000)
  assert len(list(read_records(str(tmp_path / 'a.csv')))) == 1000
  (tmp_path / 'a.csv').write_text('text,n\nx,1\n"x,1\n' + 'x,1\n' * 1000)
  with pytest.raises(UserError, match=r'a\.csv:\d+ is in a row of more than .*: look for a quote'):
    list(read_records(str(tmp_path / 'a.csv')))
  (tmp_path / 'a.csv').write_text(',' * 900 + '\nx')
  with pytest.raises(UserError) as error:
    list(read_records(str(tmp_path / 'a.csv')))
  assert len(str(error.value)) < 800


def test_an_empty_list_and_long_cells(tmp_path):
  (tmp_path / 'a.json').write_text(' [ ] \n')
  assert list(read_records(str(tmp_path / 'a.json'))) == []
  (tmp_path / 'a.csv').write_text(f'text\n{"x" * 300_000}\n')
  assert len(next(read_records(str(tmp_path / 'a.csv')))[1]['text']) == 300_000


def test_documents_come_from_tables(tmp_path):
  (tmp_path / 'a.csv').write_text('id,text\n1,hello\n2,\n3,"you, there"\n')
  source = DocumentSource([str(tmp_path / '*.csv')], packaged.VOCAB, 8192)
  (found,) = StreamInput(source, 16, 1, shuffle=False).eval_batches(slice(None))
  assert found['weights'].sum() > 4


def test_messages_in_a_table_are_json(tmp_path):
  messages = [dict(role='user', content='a'), dict(role='assistant', content='b')]
  (tmp_path / 'a.csv').write_text('messages,tools\n' + cells(json.dumps(messages), '') + '\n')
  template = '{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}'
  rows = SftRows([str(tmp_path / 'a.csv')], packaged.VOCAB, 64, 8192, chat_template=template)
  assert rows.num_examples == 1


@pytest.mark.parametrize(
  ('text', 'files'),
  [
    ('a.jsonl', ['a.jsonl']),
    ('a.jsonl,b.jsonl', ['a.jsonl', 'b.jsonl']),
    ('a.jsonl, b c.jsonl', ['a.jsonl', 'b c.jsonl']),
    ('2024', ['2024']),
    ('2024,2025', ['2024', '2025']),
    ('data/*.jsonl', ['data/*.jsonl']),
    ("['a.jsonl','b.jsonl']", ['a.jsonl', 'b.jsonl']),
    ('[a.jsonl,b.jsonl]', ['a.jsonl', 'b.jsonl']),
    ("it's.jsonl", ["it's.jsonl"]),
    ('a(1).jsonl', ['a(1).jsonl']),
  ],
)
def test_files_are_named_without_python_quotes(text, files):
  assert parse(SftFiles, 'TRAIN_FILES', text) == files


_JSON = st.recursive(
  st.one_of(st.integers(0, 9), st.text('ab', max_size=3)),
  lambda inner: st.dictionaries(st.sampled_from('abc'), inner, min_size=1, max_size=3),
  max_leaves=6,
)


@settings(
  max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.dictionaries(st.sampled_from(['x', 'y']), _JSON), min_size=2, max_size=4))
def test_a_table_says_what_json_lines_say_at_every_depth(tmp_path, rows):
  try:
    table = pa.Table.from_pylist([{'messages': [row]} for row in rows])
  except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
    assume(False)  # a key has values of several kinds
  path = tmp_path / 'rows.parquet'
  try:
    pq.write_table(table, path)
  except pa.ArrowNotImplementedError:  # Parquet has no structs without fields
    assume(False)
  assert [record['messages'] for _, record in read_records(str(path))] == [[row] for row in rows]
