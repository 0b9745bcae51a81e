"""Which files the objects below a prefix become."""

import pytest

from paxlite.core.errors import UserError
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.stored_files import files_below, piece_name


def files(gcs, **objects):
  for name, content in objects.items():
    gcs.put(f'/bkt/run/{name}', content)
  found = files_below(ObjectStore('gs://bkt'), 'run')
  return {name: [o.name.removeprefix('run/') for o in of] for name, of in found.items()}


def test_pieces_are_one_file(gcs):
  names = [piece_name('m', number) for number in (0, 1, 2, 4)]
  found = files(gcs, **dict.fromkeys([*names, 'm.a', 'n.piece00001', 'd/m'], b'x'))
  assert found == {
    'm': names[:3],  # one is missing, so the file ends before it
    'm.a': ['m.a'],
    'n.piece00001': ['n.piece00001'],
    'd/m': ['d/m'],
  }


def test_an_empty_object_beside_its_folder_is_a_marker(gcs):
  assert files(gcs, **{'d': b'', 'd/m': b'x', 'e': b''}) == {'d/m': ['d/m'], 'e': ['e']}


@pytest.mark.parametrize(
  ('objects', 'text'),
  [
    ({'d': b'1', 'd/m': b'2'}, 'gs://bkt/run/d is both an object and a folder of objects,'),
    ({'n' * 256: b''}, 'gs://bkt/run/nnnn.* has a name that is too long for a file'),
    ({'nn/' * 1001: b'1'}, 'empty|too long'),
  ],
)
def test_what_no_file_can_be_is_told(gcs, objects, text):
  with pytest.raises(UserError, match=text):
    files(gcs, **objects)
