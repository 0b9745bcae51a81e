"""Objects in a bucket, by a server of GCS that enforces preconditions, and faults of a proxy."""

import builtins
import threading

import pytest

from paxlite.core.errors import UserError
from paxlite.files import output, paths, schemes
from paxlite.files.text_files import expanded, lines, read_text
from paxlite.stores import object_blocks, object_copies, object_store
from paxlite.stores.addresses import checked, parsed
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.store_errors import StoreError, reading
from paxlite.stores.store_settings import s3_settings
from tests.support.proxy import proxy


def test_addresses():
  assert parsed('gs://bkt//a/b/') == ('gs', 'bkt', 'a/b')
  assert checked('gs://bkt//a/b/') == 'gs://bkt/a/b'
  assert ObjectStore('s3://bkt/a').address('x') == 's3://bkt/a/x'
  assert paths.stored('sft:gs://bkt/a.jsonl') == 'sft:gs://bkt/a.jsonl'
  for wrong in ('gs://', 's3://B/x', 'gs://bkt/../x', 'gs://bkt/a\nb', 'az://bkt/x', 'http://x/y'):
    with pytest.raises(UserError):
      paths.stored(wrong)


def test_reading_and_writing(store, tmp_path):
  for i in range(12):
    store.write(f'a/b{i}/c d+%é', b'x' * i)
  store.write('a/top', b'0123456789')
  assert len(list(store.below('a'))) == 13  # more than a page
  assert store.folders('a') == sorted(f'b{i}' for i in range(12))
  tag = store.head('a/top').tag
  assert store.read_range('a/top', 3, 6, tag) == b'345'
  assert store.read_range('a/top', 8, 99, tag) == b'89'
  store.write('a/top', b'0123456789')
  with pytest.raises(OSError, match='the object does not exist'):
    store.read_range('a/top', 3, 6, tag)
  big = tmp_path / 'big'
  big.write_bytes(bytes(range(256)) * 70_000)  # three parts
  store.upload('a/big', big)
  assert b''.join(store.chunks('a/big')) == big.read_bytes()
  store.delete(['a/top', 'a/absent'])
  with pytest.raises(FileNotFoundError):
    store.read('a/top')
  store.delete_below('a')
  assert list(store.below('')) == []


def test_only_one_of_many_creates_an_object(store):
  won = []
  start = threading.Barrier(8)

  def create(i):
    start.wait()
    if store.create('lock', f'of {i}'.encode()) is not None:
      won.append(i)

  threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(won) == 1
  assert store.read('lock') == f'of {won[0]}'.encode()


def test_an_object_is_replaced_only_if_it_is_unchanged(store):
  tag = store.create('x', b'1')
  assert store.create('x', b'1') == tag, 'a repeated request'
  assert store.create('x', b'2') is None
  newer = store.replace('x', b'2', tag)
  assert newer not in (None, tag)
  assert store.replace('x', b'3', tag) is None
  assert store.replace('absent', b'3', tag) is None
  assert store.read('x') == b'2'


def test_faults_that_pass_are_not_seen(gcs):
  with proxy(gcs.endpoint, mode='third') as between:
    store = ObjectStore('gs://bkt', environment=gcs.environment(between.endpoint))
    for i in range(10):
      store.write(f'k{i}', b'x')
    assert len(list(store.below(''))) == 10
    assert between.requests > 13


@pytest.mark.parametrize('mode', ['503', '429', 'reset'])
def test_patience_ends(gcs, mode):
  with proxy(gcs.endpoint, mode=mode) as between:
    environment = gcs.environment(between.endpoint)
    store = ObjectStore('gs://bkt', patience=0.5, environment=environment)
    with pytest.raises(OSError, match='the store') as e:
      store.read('x')
    assert e.value.filename == 'gs://bkt/x'
    assert between.requests > 1


def test_what_no_repetition_helps(gcs, monkeypatch):
  with pytest.raises(StoreError, match=r'gs://none: bucket none does not exist: create it'):
    ObjectStore('gs://none').check()
  monkeypatch.setenv('GOOGLE_BEARER_TOKEN', 'another-secret')
  with pytest.raises(StoreError, match='refuses these credentials') as e:
    ObjectStore('gs://bkt').check()
  assert 'secret' not in str(e.value)
  environment = {'AWS_ENDPOINT_URL': gcs.endpoint}  # the metadata server is nowhere, see conftest
  with pytest.raises(StoreError, match='AWS_ACCESS_KEY_ID'):
    ObjectStore('s3://bkt', patience=0.2, environment=environment).check()


def test_a_profile_has_the_credentials(tmp_path):
  (tmp_path / 'credentials').write_text('[me]\naws_access_key_id = A\naws_secret_access_key = B%\n')
  (tmp_path / 'config').write_text('[profile me]\nregion = eu-north-1\n')
  environment = {
    'AWS_PROFILE': 'me',
    'AWS_SHARED_CREDENTIALS_FILE': str(tmp_path / 'credentials'),
    'AWS_CONFIG_FILE': str(tmp_path / 'config'),
  }
  keys = {'access_key_id': 'A', 'secret_access_key': 'B%', 'region': 'eu-north-1'}
  assert s3_settings(environment) == keys
  assert s3_settings({**environment, 'AWS_ACCESS_KEY_ID': 'C'})['access_key_id'] == 'C'


def test_a_missing_package_is_named(monkeypatch):
  real = builtins.__import__

  def fail(name, *args, **kwargs):
    if name.startswith('obstore'):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', fail)
  with pytest.raises(UserError, match=r'gs://bkt needs the package obstore: pip install .*gcs\]'):
    ObjectStore('gs://bkt')


@pytest.mark.parametrize(
  ('error', 'text'),
  [
    (OSError(5, 'Input/output error'), 'gs://bucket/a cannot be read: Input/output error'),
    (OSError(5, 'Input/output error', '/b'), '/b cannot be read: Input/output error'),
    (OSError('the answer is too short'), 'gs://bucket/a cannot be read: the answer is too short'),
  ],
)
def test_an_error_of_reading_names_place_and_reason(error, text):
  with pytest.raises(UserError) as found, reading('gs://bucket/a'):
    raise error
  assert str(found.value) == text


def test_copies_follow_the_store(store, gcs, monkeypatch, tmp_path):
  store.write('w/a', b'1')
  store.write('w/deep/b', b'22')
  store.write('w/m', b'head ')
  store.write('w/m.piece00001', b'tail')
  path = object_copies.copy_of('gs://bkt/w')
  assert {p.name: p.read_bytes() for p in path.rglob('*') if p.is_file()} == {
    'a': b'1', 'b': b'22', 'm': b'head tail',
  }  # fmt: skip
  store.write('w/a', b'3')
  store.delete(['w/deep/b'])
  before = len(gcs.requests)
  object_copies.copy_of('gs://bkt/w')
  assert (path / 'a').read_bytes() == b'3'
  assert not (path / 'deep/b').exists()
  asked = [r for r in gcs.requests[before:] if 'list-type' not in r[1] and r[0] == 'GET']
  assert len(asked) == 1, 'only what has changed is copied'
  assert schemes.shown(path / 'a') == 'gs://bkt/w/a'
  assert schemes.shown(tmp_path) == str(tmp_path)
  monkeypatch.setenv('PAXLITE_CACHE_GB', '1e-9')
  store.write('w/a', b'4444')
  with pytest.raises(UserError, match='PAXLITE_CACHE_GB'):
    object_copies.copy_of('gs://bkt/w')
  with pytest.raises(UserError, match='does not exist'):
    object_copies.copy_of('gs://bkt/none')


def test_files_are_read_from_a_bucket(store):
  text = ''.join(f'line {i}\n' for i in range(100))
  store.write('t/a.txt', text.encode())
  store.write('t/b.jsonl', b'{"text": "1"}\n{"text": "2"}\n')
  assert read_text('gs://bkt/t/a.txt') == text
  assert [n for n, _ in lines('gs://bkt/t/b.jsonl')] == [0, 1]
  assert expanded(['gs://bkt/t/*']) == ['gs://bkt/t/a.txt', 'gs://bkt/t/b.jsonl']
  with pytest.raises(UserError, match='matches no object'):
    expanded(['gs://bkt/t/*.csv'])
  with pytest.raises(UserError, match=r'gs://bkt/t/none\.txt'):
    read_text('gs://bkt/t/none.txt')


def test_blocks_are_cached_and_bounded(store, gcs, monkeypatch, tmp_path):
  content = bytes(range(256)) * 400
  store.write('tokens', content)
  found = object_blocks.ObjectBytes('gs://bkt/tokens', block=1000)
  assert found.size == len(content)
  assert found.read(1500, 3000) == content[1500:4500]
  assert found.read(len(content) - 10, 100) == content[-10:]
  before = len(gcs.requests)
  found.will_read([(50_000, 2000), (70_000, 10)])
  assert found.read(50_500, 100) == content[50_500:50_600]
  again = object_blocks.ObjectBytes('gs://bkt/tokens', block=1000)
  assert again.read(1500, 3000) == content[1500:4500]
  ranges = [r for r in gcs.requests[before:] if r[0] == 'GET']
  assert len(ranges) <= 5, 'the second reader finds the blocks on the disk'
  monkeypatch.setenv('PAXLITE_CACHE_GB', '20e-6')
  object_blocks._used.clear()
  for start in range(0, len(content), 1000):
    again.read(start, 1000)
  kept = sum(p.stat().st_size for p in (tmp_path / 'cache').rglob('*') if p.is_file())
  assert 0 < kept <= 21_000
  changed = object_blocks.ObjectBytes('gs://bkt/tokens', block=900)
  store.write('tokens', content)
  with pytest.raises(UserError, match='gs://bkt/tokens cannot be read'):
    changed.read(90_000, 1000)


def test_markers_of_folders_are_no_files(gcs, store):
  store.write('run/a', b'1')
  store.write('run/empty', b'')
  for marker in (
    'run/',
    'run/a/',
    'run/checkpoints/',
    'run/old_$folder$',
    'run/old/',
    'out/',
    'data/x/',
  ):
    gcs.put(f'/bkt/{marker}')
  assert [o.name for o in store.below('run')] == ['run/a', 'run/empty']
  assert store.folders('run') == ['a', 'checkpoints', 'old']
  assert list(store.below('out')) == []
  assert store.folders('out') == []
  place = object_copies.copy_of('gs://bkt/run')
  assert sorted(p.name for p in place.iterdir()) == ['a', 'empty']
  assert not output.exists('gs://bkt/out')
  store.write('data/x/1.jsonl', b'{}')
  assert expanded(['gs://bkt/data/*']) == ['gs://bkt/data/x/1.jsonl']
  store.delete_below('run')
  assert set(gcs.objects['bkt']) >= {'run/', 'run/checkpoints/'}, 'they do no harm'


@pytest.mark.parametrize('name', ['run//b', 'run/../b', 'run/a\x01b'])
def test_a_name_that_is_no_path_is_told(gcs, store, name):
  gcs.put(f'/bkt/{name}')
  for read in (lambda: list(store.below('run')), lambda: store.folders('run')):
    with pytest.raises(StoreError, match=r'gs://bkt/run: an object below it is named .*: rename'):
      read()


@pytest.mark.parametrize('mode', ['list-page', 'page'])
def test_a_page_is_no_list(gcs, store, monkeypatch, mode):
  store.write('run/experiment.json', b'{}')
  with proxy(gcs.endpoint, mode=mode) as between:
    environment = gcs.environment(between.endpoint)
    portal = ObjectStore('gs://bkt', patience=0.5, environment=environment)
    for read in (
      lambda: list(portal.below('run')),
      lambda: portal.folders('run'),
      lambda: list(portal.below('other', known='run/experiment.json')),
      lambda: portal.folders('run/checkpoints', 'run/experiment.json'),
    ):
      with pytest.raises(OSError, match='the server is not an object store, or hides a part of it'):
        read()
    if mode == 'page':
      with pytest.raises(OSError, match='random name'):
        portal.check()
      with pytest.raises(OSError, match='the answer has 40 bytes, but the store lists 2'):
        portal.read('run/experiment.json', 2)
      with pytest.raises(OSError, match='the answer has 40 bytes'):
        list(portal.chunks('run/experiment.json', 2))
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    object_store._proven.clear()
    with pytest.raises(UserError, match='the server is not an object store'):
      object_copies.copy_of('gs://bkt/run/')
  assert store.folders('run/checkpoints', 'run/experiment.json') == []
  store.write('run/checkpoints/one/x', b'')
  assert store.folders('run/checkpoints', 'run/experiment.json') == ['one']


def test_the_guard_is_asked_before_each_request_that_writes(gcs, tmp_path):
  """An upload in parts does not appear either if the right to write ends before its last part."""
  left = [0]

  def guard():
    left[0] -= 1
    if left[0] < 0:
      raise OSError('this process may not write any more')

  store = ObjectStore('gs://bkt', guard=guard)
  (tmp_path / 'big').write_bytes(bytes(17 << 20))  # three parts
  for writes, act in (
    (0, lambda: store.write('x', b'')),
    (0, lambda: store.create('x', b'')),
    (0, lambda: store.delete(['x'])),
    (1, lambda: store.delete([f'{i}' for i in range(21)])),
    (0, lambda: store.upload('big', tmp_path / 'big')),
    (3, lambda: store.upload('big', tmp_path / 'big')),
  ):
    left[0] = writes
    with pytest.raises(OSError, match='may not write any more'):
      act()
  assert not gcs.objects['bkt']
  left[0] = 4
  store.upload('big', tmp_path / 'big')
  assert len(gcs.objects['bkt']['big'][1]) == 17 << 20


def test_a_late_write_replaces_nothing_of_another_process(gcs, store, monkeypatch):
  late = ObjectStore('gs://bkt', guard=lambda: None)
  tag = late.write_own('x', b'1')
  store.write('x', b'of another')
  assert late.replace('x', b'2', tag) is None
  assert store.read('x') == b'of another'
  tag = late.write_own('x', b'2', tag)  # it holds the lease again, so it may
  assert store.read('x') == b'2'
  store.delete(['x'])
  assert late.write_own('x', b'3', tag)
  assert store.read('x') == b'3'
  monkeypatch.setattr(late, '_put_if', lambda *args: None)
  with pytest.raises(OSError, match='at each try'):
    late.write_own('x', b'4')
