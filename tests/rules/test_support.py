"""The tests' own tools: programs that are kept between sessions, and differences of configs."""

import itertools
import json

import pytest
import zstandard

from paxlite.config.templates import config, template
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from tests.support.config_changes import NOTHING, changes, together
from tests.support.kept_programs import KeptPrograms


def kept(root, **programs: bytes) -> set[str]:
  """Runs a session that compiles these programs; returns those that it began with."""
  session = KeptPrograms(root)
  before = {path.name for path in session.folder.iterdir() if path.suffix != '.json'}
  for name, content in programs.items():
    (session.folder / name).write_bytes(content)
  session.close()
  return before


PROGRAM = zstandard.compress(bytes(range(256)) * 100)


def test_whole_programs_are_kept(tmp_path):
  assert kept(tmp_path, a=PROGRAM, cut=PROGRAM[:-9], none=b'') == set()
  assert kept(tmp_path) == {'a'}


def test_a_session_that_was_killed_leaves_nothing_behind(tmp_path):
  kept(tmp_path, a=PROGRAM)
  killed = KeptPrograms(tmp_path)
  (killed.folder / 'b').write_bytes(PROGRAM)
  (killed.folder / 'a').write_bytes(PROGRAM[:-1])
  with pytest.raises(BlockingIOError):
    KeptPrograms(tmp_path)
  killed._lock.close()
  assert kept(tmp_path) == set()


@pytest.mark.parametrize('text', ['', '{', 'null', '[]'])
def test_a_list_of_programs_that_a_full_disk_has_cut(tmp_path, text):
  kept(tmp_path, a=PROGRAM)
  (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
  assert json.loads((folder / 'whole.json').read_text()) == {'a': len(PROGRAM)}
  (folder / 'whole.json').write_text(text)
  assert kept(tmp_path, b=PROGRAM) == set()
  assert kept(tmp_path) == {'b'}


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
  tmp_path.chmod(0o777)
  with pytest.raises(PermissionError):
    KeptPrograms(tmp_path)


def layer(**values):
  return template(FeedForward, model_dims=8, hidden_dims=16, **values)


VALUES = [
  None, 1, True, 1.0, [], [1], [1, 2], {'a': 1}, layer(), layer(activation='relu'),
  template(GatedFeedForward, model_dims=8, hidden_dims=16),
  config(FeedForward, model_dims=8, hidden_dims=16),
  [layer()], [layer()] * 2, [layer(), layer(activation='relu')], [None, layer()],
  [None, layer(activation='relu')], [None, layer(activation='relu'), None],
  {'w': 0.5, 'a': layer()}, {'a': layer(activation='relu')},
  {'w': 0.5, 'a': layer(activation='relu')},
]  # fmt: skip


@pytest.mark.parametrize('old', [NOTHING, *VALUES], ids=itertools.count())
def test_other_configs_have_other_lines(old):
  texts = ['\n'.join(changes('x', old, new)) for new in VALUES]
  texts += ['\n'.join(together(changes('x', old, new))) for new in VALUES]
  each = len(VALUES)
  for found in (texts[:each], texts[each:]):
    assert len({*found}) == each
    assert [value for value, text in zip(VALUES, found, strict=True) if not text] == [
      value for value in VALUES if value is old
    ]


def test_places_with_the_same_change_are_one_line():
  lines = ['task.a.b = 1', 'task.a.c.b = 1', 'task.a.c: x.Y', 'task.b.d = (1, 2)']
  assert list(together(lines)) == ['task.{a, a.c}.b = 1', 'task.a.c: x.Y', 'task.b.d = (1, 2)']
