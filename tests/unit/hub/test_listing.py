"""Downloads from a Hub with faults: right files or one line, and nothing half.

Rebuilt from public reports to huggingface_hub, its number after each: files of the right size with
other contents (1498), a busy Hub (3312), no network though there are copies (4487), copies of a
part (1913), and weights that come several times in several formats (2831).
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.hub import answers, models
from paxlite.hub.listing import listing_of
from paxlite.hub.names import HubName
from tests.support import runs
from tests.support.hub_server import Fault
from tests.unit.hub.conftest import forget, nothing_half, tiny_llama

NAME = HubName('org/tiny')
FILES = {
  'a.json': b'{}',
  'b.safetensors': random.Random(1).randbytes(200_000),
  'c/d.txt': b'd' * 99,
}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
  """Waits are as long as they are stated, and otherwise short."""
  monkeypatch.setattr(answers, '_WAITS', (0.01, 0.01))


def downloaded() -> dict[str, bytes]:
  listing_of.cache_clear()
  folder = listing_of(NAME).download([*FILES])
  return {name: (folder / name).read_bytes() for name in FILES}


def test_what_is_named_is_downloaded_once(hub):
  hub.add('org/tiny', FILES | {'other.bin': b'x' * 10_000})
  assert downloaded() == FILES
  first = len(hub.requests)
  assert downloaded() == FILES
  assert len(hub.requests) == first + 1  # which commit is the newest
  assert not hub.asked('other.bin')


def test_a_new_commit_is_found_and_an_old_one_stays(hub):
  first = hub.add('org/tiny', FILES)
  assert downloaded() == FILES
  hub.add('org/tiny', FILES | {'a.json': b'[]'})
  assert downloaded() == FILES | {'a.json': b'[]'}
  old = listing_of(HubName('org/tiny', first)).download(['a.json'])
  assert (old / 'a.json').read_bytes() == b'{}'
  assert len(hub.asked('GET /lfs/')) == 1  # the large file is the same


def drawn_fault(rng: random.Random) -> Fault:
  where = rng.choice(['/api/', 'HEAD .*resolve', 'GET .*(resolve|lfs)/', 'GET /lfs'])
  times = rng.choice([1, 1, 2, 99])
  if where.startswith('GET') and rng.random() < 0.6:
    kinds = dict(cut=rng.choice([0, 1, 20_000, 150_000])), dict(wrong=True), dict(pause=0.01)
    return Fault(where, times=times, **rng.choice(kinds))
  headers = rng.choice([{}, {'Retry-After': '0'}])
  return Fault(where, rng.choice([401, 403, 404, 429, 500, 503]), headers, times=times)


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize('seed', range(24))
def test_faults_leave_nothing_half_and_the_next_start_goes_on(hub, tmp_path, seed, monkeypatch):
  monkeypatch.setattr(time, 'sleep', lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.02)))
  rng = random.Random(seed)
  hub.add('org/tiny', FILES)
  for _ in range(6):
    forget(tmp_path / 'home')
    shutil.rmtree(tmp_path / 'cache', ignore_errors=True)
    hub.faults[:] = [drawn_fault(rng) for _ in range(rng.choice([1, 2]))]
    what = str(hub.faults)
    try:
      assert downloaded() == FILES, what
    except UserError as e:
      said = str(e)
      assert said.startswith('org/tiny: '), what
      assert len(said) < 500, what
      assert re.search('run the command again|HF_TOKEN|spelling|again in', said), (what, said)
    nothing_half(tmp_path / 'home', FILES)
    hub.faults.clear()
    assert downloaded() == FILES, what


def test_other_contents_of_the_same_size_are_removed(hub, tmp_path):
  hub.add('org/tiny', FILES)
  for path in ('lfs', 'c/d.txt'):
    hub.faults[:] = [Fault(f'GET .*{path}', wrong=True)]
    with pytest.raises(UserError, match=r'but the Hub states .* run the command again'):
      downloaded()
    nothing_half(tmp_path / 'home', FILES)
    assert downloaded() == FILES
    forget(tmp_path / 'home')


def test_sums_are_compared_once_for_each_copy(hub, tmp_path):
  large = {'b.safetensors': random.Random(2).randbytes(2 << 20)}
  hub.add('org/tiny', large)
  fetch = lambda: listing_of(NAME).download([*large]) / 'b.safetensors'
  blob = fetch().resolve()
  content = blob.read_bytes()
  about = blob.stat()
  blob.write_bytes(content[:-1] + b'?')  # a disk may change it and leave its time
  os.utime(blob, ns=(about.st_atime_ns, about.st_mtime_ns))
  fetch()
  os.utime(blob)
  with pytest.raises(UserError, match='paxlite removed it; run the command again'):
    fetch()
  assert fetch().read_bytes() == content


def test_a_busy_hub_is_asked_again_after_the_time_it_states(hub, capsys):
  hub.add('org/tiny', FILES)
  hub.faults[:] = [Fault('/api/', 429, {'Retry-After': '1'})]
  started = time.monotonic()
  assert downloaded() == FILES
  assert time.monotonic() - started > 1
  assert 'org/tiny: the Hub answers 429; retrying in 1 s' in capsys.readouterr().err


def test_a_hub_that_stays_busy_leaves_the_copies(hub, capsys):
  hub.add('org/tiny', FILES)
  busy = Fault('/api/', 429, {'Retry-After': '0'}, times=1000)
  hub.faults[:] = [busy]
  with pytest.raises(UserError, match=r'429, too many requests: try again in 0 s; HF_TOKEN raises'):
    downloaded()
  hub.faults.clear()
  assert downloaded() == FILES
  hub.faults[:] = [busy]
  assert downloaded() == FILES
  assert 'Reading the copy of commit' in capsys.readouterr().err


def test_without_a_network_copies_are_read(hub, monkeypatch, capsys):
  commit = hub.add('org/tiny', FILES)
  offline = lambda on: monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', on)
  offline(True)
  with pytest.raises(
    UserError, match=r'org/tiny: HF_HUB_OFFLINE is set: unset it .* nor this path exists here'
  ):
    downloaded()
  offline(False)
  downloaded()
  offline(True)
  before = len(hub.requests)
  assert downloaded() == FILES
  assert listing_of(HubName('org/tiny', commit)).download(['a.json']).is_dir()
  assert len(hub.requests) == before
  offline(False)
  monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', 'http://127.0.0.1:9')
  assert downloaded() == FILES
  assert 'cannot be read' in capsys.readouterr().err


def test_copies_of_a_part_are_no_model(hub, monkeypatch):
  files = tiny_llama()
  hub.add('org/tiny', files)
  listing_of(NAME).download(['config.json', 'tokenizer.model'])
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  listing_of.cache_clear()
  with pytest.raises(
    UserError, match=r'HF_HUB_OFFLINE.*Of its copy: org/tiny holds no .safetensors'
  ):
    models.download_of('org/tiny')('to')
  with pytest.raises(UserError, match=r'lacks a.json'):
    downloaded()


@pytest.mark.parametrize(
  ('more', 'token', 'said'),
  [
    (dict(gated=True), '', r'gated: accept its terms at http://\S+/org/tiny, and set HF_TOKEN$'),
    (dict(gated=True), 'bad', r'HF_TOKEN'),
    (dict(private=True), '', r'neither a path here nor a public model at .* check the'),
    (dict(), 'absent', r'nor a public model at http://\S+/org/no: check the spelling'),
    (dict(), 'revision', r'org/tiny@v9: revision v9 does not exist'),
    (dict(), 'dashes', r'org/a--b: .* --'),
  ],
)
def test_what_may_not_be_read_is_said_in_one_line(hub, monkeypatch, more, token, said):
  hub.add('org/tiny', FILES, **more)
  if token == 'bad':
    monkeypatch.setenv('HF_TOKEN', 'hf_bad')
  name = {
    'absent': HubName('org/no'),
    'dashes': HubName('org/a--b'),
    'revision': HubName('org/tiny', 'v9'),
  }.get(token, NAME)
  with pytest.raises(UserError, match=said) as caught:
    listing_of(name).download(['a.json'])
  assert '\n' not in str(caught.value)


def test_a_token_opens_what_is_gated_or_private(hub, monkeypatch):
  hub.add('org/tiny', FILES, gated=True, private=True)
  hub.tokens['hf_good'] = {'name': 'someone'}
  monkeypatch.setenv('HF_TOKEN', 'hf_good')
  assert downloaded() == FILES


def test_without_the_package_its_extra_is_named(hub, monkeypatch):
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  said = r'org/tiny: this path does not exist: the Hugging Face Hub needs a package: pip .*hub\]'
  with pytest.raises(UserError, match=said):
    listing_of(NAME)


def test_names_that_a_hub_makes_up_lead_nowhere(hub, tmp_path):
  commit = hub.add('org/tiny', FILES)
  repo = hub.repos['model', 'org/tiny']
  listing_of(NAME).download(['a.json'])
  victim = tmp_path / 'victim.json'
  victim.write_text('mine')
  for bad in ('../../x', '/tmp/paxlite-x', 'a/../../x', str(victim), f'a/{"../" * 20}{victim}'):
    repo.commits[commit] = {'a.json': b'', bad: b'x'}
    listing_of.cache_clear()
    with pytest.raises(UserError, match='it has no file'):
      listing_of(NAME)
  repo.commits[commit] = FILES
  listing_of.cache_clear()
  link = listing_of(NAME).folder / 'a.json'
  link.unlink()
  link.symlink_to(victim)
  with pytest.raises(UserError, match='paxlite removed it'):
    listing_of(NAME).download(['a.json'])
  assert victim.read_text() == 'mine'
  repo.commits.clear()
  repo.commits['../../..'] = FILES
  listing_of.cache_clear()
  with pytest.raises(UserError, match='has no files yet'):
    listing_of(NAME)
  assert not list(tmp_path.rglob('x'))


def test_room_on_the_disk_is_looked_for_first(hub, tmp_path):
  hub.add('org/tiny', FILES, claimed={'b.safetensors': 1 << 60})
  with pytest.raises(UserError, match=r'has room for .* GB, but .* GB are needed: make room'):
    downloaded()
  assert not hub.asked('resolve')
  assert not (tmp_path / 'home').exists()


def test_only_the_files_that_a_model_needs(hub, tmp_path):
  files = tiny_llama()
  weights = files.pop('model.safetensors')
  index = {'weight_map': {'a': 'model-00001-of-00002.safetensors', 'b': 'model-2.safetensors'}}
  files |= {
    'model.safetensors.index.json': json.dumps(index).encode(),
    'model-00001-of-00002.safetensors': weights, 'model-2.safetensors': b'2' * 5000,
  }  # fmt: skip
  others = {
    f'{n}': b'x' * 5000
    for n in (
      'pytorch_model.bin', 'original/model.safetensors', 'original/consolidated.00.pth', 'm.gguf',
      'onnx/model.onnx', 'consolidated.safetensors', 'tf_model.h5', 'README.md', 'metal/model.bin',
    )
  }  # fmt: skip
  hub.add('org/tiny', files | others)
  folder = models.download_of('org/tiny')(str(tmp_path / 'to'))
  found = {p.relative_to(folder).as_posix() for p in pathlib.Path(folder).rglob('*')}
  assert found == set(files)
  for name in others:
    assert not hub.asked(re.escape(name)), name


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (dict(config=None), 'has no config.json'),
    (dict(config=b'{"model_type": "zebra"}'), 'zebra'),
    (dict(config=b'{"model_'), 'config.json'),
    (dict(weights='pytorch_model.bin'), 'convert its .bin files'),
    (dict(weights='model-00001-of-00002.safetensors'), '1 of 2 files'),
    (dict(adapter=True), 'adapter'),
  ],
)
def test_what_cannot_be_read_is_not_downloaded(hub, tmp_path, change, said):
  files = tiny_llama()
  weights = files.pop('model.safetensors')
  files[change.get('weights', 'model.safetensors')] = weights
  if 'config' in change:
    files.pop('config.json')
    files |= {'config.json': change['config']} if change['config'] else {}
  if change.get('adapter'):
    files['adapter_config.json'] = b'{}'
  hub.add('org/tiny', files)
  with pytest.raises(UserError, match=said) as caught:
    models.download_of('org/tiny')(str(tmp_path / 'to'))
  assert 'org/tiny' in str(caught.value)
  assert len(hub.asked('GET /lfs')) <= 1  # the tokenizer at most


DOWNLOAD = """
from paxlite.hub.listing import listing_of
from paxlite.hub.names import HubName
print(listing_of(HubName('org/tiny')).download(['big.safetensors']) / 'big.safetensors')
"""


@pytest.mark.slow
def test_a_killed_download_goes_on_where_it_was(hub, tmp_path):
  big = random.Random(3).randbytes(32 << 20)  # three chunks of the package
  hub.add('org/tiny', {'big.safetensors': big})
  hub.faults[:] = [Fault('GET /lfs', pause=0.002)]
  command = [sys.executable, '-c', DOWNLOAD]
  process = subprocess.Popen(command, env=runs.environment(), cwd=runs.ROOT)
  blobs = tmp_path / 'home/hub/models--org--tiny/blobs'
  part = lambda: sum(p.stat().st_size for p in blobs.glob('*.incomplete'))
  while part() < 1 << 20:
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  had = part()
  assert 1 << 20 <= had < len(big)
  done = subprocess.run(
    command, env=runs.environment(), cwd=runs.ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  file = pathlib.Path(done.stdout.strip())
  assert file.read_bytes() == big
  assert [r for r in hub.asked('GET /lfs') if f'bytes={had}-' in r]
  assert not [*blobs.glob('*.incomplete')]
  assert 'org/tiny: 1 file, 0.03 GB, into' in done.stderr
  assert 'downloaded in' in done.stderr


def test_a_part_that_was_damaged_is_not_continued(hub, tmp_path):
  hub.add('org/tiny', FILES)
  sums = listing_of(NAME).sums['b.safetensors']
  blobs = tmp_path / 'home/hub/models--org--tiny/blobs'
  blobs.mkdir(parents=True)
  for end, content in (('a', b'?' * 1000), ('b', b'!' * 900_000), ('c', b'')):
    (blobs / f'{sums}.{end}.incomplete').write_bytes(content)
  assert downloaded() == FILES
  assert not [*blobs.glob('*.incomplete')]
