"""Many examples are tokenized once, by workers, into files that the next start reads."""

import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning import example_cache
from paxlite.finetuning.chats import example_files
from paxlite.finetuning.chats.sft import AnswerRows, SftRows
from paxlite.finetuning.preferences.labelled_answers import LabelledRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows, RewardRows
from paxlite.finetuning.reinforcement.prompts import Prompts
from tests.support import example_builder

TEMPLATE = example_builder.TEMPLATE
WORDS = 'the', 'king', 'said', 'unto', 'them', 'é', 'x1'
OF = 'fingerprint tokens_fingerprint rows_fingerprint max_token_id num_learned num_cut num_skipped'


def chat(rng, *answers):
  words = lambda: ' '.join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
  said = [dict(role='user', content=words())]
  for _ in range(rng.randint(0, 2)):
    said += [dict(role='assistant', content=words()), dict(role='user', content=words())]
  return said, [dict(role='assistant', content=words() + each) for each in answers]


def record(rng, kind):
  """Draws a record; some cannot be read, some have keys that nobody reads."""
  if rng.random() < 0.08:
    return rng.choice(['not json', '{"foo": 1}', '{"prompt": "q", "completion": ""}'])
  asked, answers = chat(rng, '', '!')
  odd = {f'odd{rng.randint(0, 3)}': 1} if rng.random() < 0.1 else {}
  if kind == 'pair':
    return json.dumps(dict(prompt=asked, chosen=answers[:1], rejected=answers[1:]) | odd)
  label = dict(label=rng.random() < 0.5) if kind == 'label' else {}
  if rng.random() < 0.5:
    text = asked[0]['content']
    return json.dumps(dict(prompt=text, completion=answers[0]['content']) | label | odd)
  return json.dumps(dict(messages=[*asked, *answers[:1]]) | label | odd)


def written(path, seed, kind='chat', count=60):
  rng = random.Random(seed)
  path.write_text(''.join(record(rng, kind) + '\n' for _ in range(count)))
  return str(path)


def opened(files, cache, cls=SftRows, seq_len=128, **kwargs):
  arguments = dict(chat_template=TEMPLATE, skip_unreadable=True, too_long='skip') | kwargs
  return cls(files, packaged.VOCAB, seq_len, 8192, cache=str(cache), **arguments)


@pytest.fixture
def few(monkeypatch):
  """Lets 20 records be many, and this process encode them."""
  monkeypatch.setattr(example_files._first, '__defaults__', (20, 1 << 25))
  monkeypatch.setattr(example_files, '_BLOCK_RECORDS', 7)
  monkeypatch.setattr(example_files, 'usable_cores', lambda: 1)


def what_is_read(rows):
  every = np.arange(len(rows))
  batch, origins = rows.read(every), rows.origins(every)
  left = rows.leave_out([rows.place_of(0), rows.place_of(rows.num_examples - 1)])
  arrays = [*sorted(batch.items()), ('origins', origins), *sorted(rows.read(every).items())]
  return dict(
    {name: getattr(rows, name) for name in OF.split()},
    arrays=[(k, v.dtype.str, v.tolist()) for k, v in arrays],
    left=left,
    warnings=rows.warnings,
    lengths=rows.lengths.tolist(),
    formats=rows.formats.most_common(),
    refused=(rows.refused.count, rows.refused.messages),
    long=(rows.long.count, rows.long.first, rows.long.longest),
    places=[str(rows.place_of(i)) for i in range(rows.num_examples)],
  )


CLASSES = [(SftRows, 'chat'), (AnswerRows, 'chat'), (PreferenceRows, 'pair'), (RewardRows, 'pair'),
           (LabelledRows, 'label')]  # fmt: skip


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize(('cls', 'kind'), CLASSES)
def test_rows_from_files_are_those_from_memory(tmp_path, few, cls, kind):
  drawn = random.Random(cls.__name__)
  for seed in range(4):
    files = [written(tmp_path / f'{seed}_{i}.jsonl', f'{seed}{i}', kind) for i in range(2)]
    truncates = kind == 'chat' and drawn.random() < 0.5
    options = dict(
      seq_len=drawn.choice([100, 128, 300]),
      too_long='truncate' if truncates else 'skip',
      split=drawn.choice(['all', 'train', 'held_out']),
      held_out_share=0.2,
    )
    kept = what_is_read(opened(files, 'off', cls, **options))
    for _ in range(2):  # made, and read again
      assert what_is_read(opened(files, tmp_path / 'cache', cls, **options)) == kept


def test_prompts_from_files_are_those_from_memory(tmp_path, few):
  rng, path = random.Random(5), tmp_path / 'a.jsonl'
  asked = lambda i: rng.choice([f'{i} is', chat(rng)[0]])
  records = [json.dumps(dict(prompt=asked(i), answer=i, é=None)) for i in range(50)]
  path.write_text('\n'.join([*records, '{"prompt": 3}', *records[:5]]))
  encoding = ChatEncoding(open_tokenizer(packaged.VOCAB), 8192, chat_template=TEMPLATE)
  made = lambda cache: Prompts([str(path)], encoding, 60, True, str(cache))
  memory, *others = map(made, ['off', tmp_path / 'cache', tmp_path / 'cache'])
  assert memory.refused.count > 0
  for other in others:
    assert list(other) == list(memory)
    of = lambda x: (x.fingerprint, x.tokens_fingerprint, x.refused.messages)
    assert of(other) == of(memory)
  line = int(memory[7].place.rpartition(':')[2])
  assert memory[7].record == json.loads(path.read_text().splitlines()[line - 1])


@pytest.mark.slow
def test_workers_make_the_same(tmp_path, few, monkeypatch):
  monkeypatch.setattr(example_files, 'usable_cores', lambda: 2)
  for cls, kind in CLASSES[::4]:
    files = [written(tmp_path / f'{kind}.jsonl', 3, kind)]
    found = what_is_read(opened(files, tmp_path / 'cache', cls))
    assert found == what_is_read(opened(files, 'off', cls))


def test_a_second_start_encodes_nothing(tmp_path, few, monkeypatch):
  file = written(tmp_path / 'a.jsonl', 1)
  first = what_is_read(opened([file], tmp_path / 'cache'))
  monkeypatch.setattr(example_files, 'encode_blocks', None)
  assert what_is_read(opened([file], tmp_path / 'cache')) == first
  # lengths and what is held out are chosen from the same files
  opened([file], tmp_path / 'cache', seq_len=100, split='train', held_out_share=0.2)
  with pytest.raises(TypeError):  # another template encodes again
    opened([file], tmp_path / 'cache', chat_template=TEMPLATE + ' ')
  with pytest.raises(TypeError):
    opened([file], tmp_path / 'cache', start_id=5)


def test_a_changed_file_is_read_again(tmp_path, few):
  path = tmp_path / 'a.jsonl'
  lines = written(path, 1) and path.read_text().splitlines()
  before = opened([str(path)], tmp_path / 'cache')
  for number in (0, 30, 59):  # of the same size and, but for one of them, the same ends
    lines[number] = json.dumps(dict(prompt=f'{number} was', completion=' other'))
    path.write_text('\n'.join(lines))
    now = opened([str(path)], tmp_path / 'cache')
    assert now.fingerprint != before.fingerprint
    assert now.fingerprint == opened([str(path)], 'off').fingerprint
    before = now


def test_a_file_that_changes_while_it_is_read(tmp_path, few, monkeypatch):
  path, write = tmp_path / 'a.jsonl', example_files.write_blocks
  written(path, 1)

  def changing(*args):
    found = write(*args)
    path.write_text(path.read_text() + '\n')
    return found

  monkeypatch.setattr(example_files, 'write_blocks', changing)
  with pytest.raises(UserError, match='changed while it was read'):
    opened([str(path)], tmp_path / 'cache')
  assert not [p for p in (tmp_path / 'cache').iterdir() if p.is_dir()]


def test_a_damaged_file_is_made_again(tmp_path, few, caplog):
  file, cache = written(tmp_path / 'a.jsonl', 1), tmp_path / 'cache'
  kept = what_is_read(opened([file], cache))
  names = [p for p in sorted(cache.glob('*/*')) if p.stat().st_size]
  assert len(names) > 10
  for path in names:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[: random.choice([len(data), len(data) // 2])])
    caplog.clear()
    assert what_is_read(opened([file], cache)) == kept, path
    assert 'is damaged and made again' in caplog.text, path


def test_a_full_disk_is_one_line(tmp_path, few):
  file = written(tmp_path / 'a.jsonl', 1)
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match=r'cannot be written .*EXAMPLE_CACHE=off'):
    opened([file], tmp_path / 'file')
  cache = tmp_path / 'cache'
  code = (
    'import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); '
    'sys.dont_write_bytecode = True; '  # which would be cut, too
    'resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))'
  )
  done = example_builder.started(file, cache, code).communicate(timeout=120)
  assert 'UserError' in done[1]
  assert 'cannot be written' in done[1]
  assert not [p for p in cache.iterdir() if p.is_dir()]


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_is_read(tmp_path, few):
  file, cache = written(tmp_path / 'a.jsonl', 1), tmp_path / 'cache'
  process = example_builder.started(file, cache, 'slow = True')
  while not list(cache.glob('*.unfinished/tokens.bin')):
    assert process.poll() is None, process.communicate()
    time.sleep(0.02)
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert list(cache.glob('*.unfinished'))
  kept = what_is_read(opened([file], 'off'))
  assert what_is_read(opened([file], cache)) == kept
  assert not list(cache.glob('*.unfinished'))


@pytest.mark.slow
def test_of_two_processes_one_makes_it(tmp_path):
  file, cache = written(tmp_path / 'a.jsonl', 1), tmp_path / 'cache'
  both = [example_builder.started(file, cache) for _ in range(2)]
  said = [process.communicate(timeout=120) for process in both]
  fingerprints, times = zip(*(out.split() for out, _ in said), strict=True)
  assert len(set(fingerprints)) == 1, said
  assert sorted(times) == ['0', '1'], said
  assert len([p for p in cache.iterdir() if p.is_dir()]) == 2  # examples, and rows


def test_what_nobody_opens_is_removed(tmp_path, few):
  file, cache = written(tmp_path / 'a.jsonl', 1), tmp_path / 'cache'
  opened([file], cache)
  old = [p for p in cache.iterdir() if p.is_dir()]
  for path in old:
    os.utime(path / 'meta.json', (0, 0))
  opened([file], cache)  # opens, and so keeps them
  opened([file], cache, seq_len=100)
  assert all(path.exists() for path in old)
  os.utime(old[0] / 'meta.json', (0, 0))
  example_cache._remove_old(cache, '')
  assert not old[0].exists()


@pytest.mark.slow
def test_a_script_without_a_guard_starts_workers(tmp_path):
  file, script = written(tmp_path / 'a.jsonl', 1), tmp_path / 'mine.py'
  code = example_builder.code(file, tmp_path / 'cache', 'cores = 2')
  leaks = 'import os; assert "PYTHONSAFEPATH" not in os.environ'  # reward functions need it unset
  script.write_text(f'print("started")\n{code}\n{leaks}')
  done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
  assert done.stdout.splitlines()[0] == 'started', done.stderr
  assert done.stdout.count('started') == 1
  assert done.returncode == 0, done.stderr


def test_without_locks_the_slower_of_two_processes_reads_what_the_faster_one_made(tmp_path):
  cache = example_cache.ExampleCache(str(tmp_path))
  array = {'a': np.arange(3)}

  def make(writer):
    place = next(tmp_path.glob('*.unfinished'))
    faster = place.with_name(place.name.partition('.')[0])
    faster.mkdir()
    whole = example_cache.ArrayWriter(faster)
    for each in (whole, writer):
      each.append(array)
    whole.finish({'by': 'faster'})
    whole.close()
    return {'by': 'slower'}

  found = cache.get({'key': 1}, make)
  assert found.facts == {'by': 'faster'}
  assert not list(tmp_path.glob('*.unfinished'))


def test_a_lock_that_is_old_stays_and_holds_threads_off(tmp_path):
  cache, begun = example_cache.ExampleCache(str(tmp_path)), []

  def make(writer):
    begun.append(1)
    for lock in tmp_path.glob('*.lock'):
      os.utime(lock, (0, 0))
    cache.get({'other': len(begun)}, lambda w: w.append({'a': np.arange(2)}) or {})
    time.sleep(0.3)
    writer.append({'a': np.arange(3)})
    return {}

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    found = list(pool.map(lambda _: cache.get({'key': 1}, make), range(3)))
  assert len(begun) == 1
  assert all(each.arrays['a'].tolist() == [0, 1, 2] for each in found)
