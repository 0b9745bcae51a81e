"""The format of weights is told by the names of files."""

import pytest

from paxlite.checkpointing.foreign_weights import formats_at
from paxlite.core.errors import UserError
from paxlite.tools import import_weights


@pytest.mark.parametrize(
  ('name', 'files', 'sources'),
  [
    ('hf', ['config.json', 'model.safetensors'], ['hf']),
    ('shards', ['model.safetensors.index.json', 'model-00001-of-00002.safetensors'], ['hf']),
    ('meta', ['params.json', 'consolidated.00.pth'], ['meta']),
    ('gguf', ['model-Q8_0.gguf'], ['gguf']),
    ('package', ['some_package/model.gguf', 'some_package/__init__.py'], ['gguf']),
    ('checkpoint_00000100', ['metadata', 'state/x'], ['pax']),
    ('both', ['a.gguf', 'model.safetensors'], ['gguf', 'hf']),
    ('text', ['notes.txt'], []),
  ],
)
def test_files_tell_the_format(tmp_path, name, files, sources):
  folder = tmp_path / name
  for file in files:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).touch()
  assert [f.source for f in formats_at(str(folder))] == sources
  if name == 'gguf':
    assert [f.source for f in formats_at(str(folder / files[0]))] == sources


@pytest.mark.parametrize('path', ['gone', 'x' * 5000, 'a\0b'])
def test_what_is_not_there_has_no_format(path):
  assert formats_at(path) == []


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    (['notes.txt'], 'has no weights of Hugging Face .* GGUF'),
    (['a.gguf', 'b.pth'], 'several formats: choose --from=gguf or --from=meta'),
  ],
)
def test_an_import_says_what_it_looked_for(tmp_path, files, message):
  for file in files:
    (tmp_path / file).touch()
  with pytest.raises(UserError, match=message):
    import_weights.main([str(tmp_path), f'--to={tmp_path / "new"}'])
  assert not (tmp_path / 'new').exists()
