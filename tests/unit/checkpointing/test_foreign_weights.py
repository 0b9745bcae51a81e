"""The format of weights is told by the names of files."""

import pytest

from paxlite.checkpointing.foreign_weights import formats_at
from paxlite.core.errors import UserError
from paxlite.weights.commands import import_weights


@pytest.mark.parametrize(
  ('name', 'files', 'sources'),
  [
    ('hf', ['config.json', 'model.safetensors'], ['hf']),
    ('shards', ['model.safetensors.index.json', 'model-00001-of-00002.safetensors'], ['hf']),
    ('meta', ['params.json', 'consolidated.00.pth'], ['meta']),
    ('gguf', ['model-Q8_0.gguf'], []),
    ('checkpoint_00000100', ['metadata', 'state/x'], ['pax']),
    ('both', ['a.pth', 'model.safetensors'], ['meta', 'hf']),
    ('text', ['notes.txt'], []),
    ('bin', ['config.json', 'pytorch_model.bin'], ['hf']),
    ('bins', ['pytorch_model.bin.index.json', 'pytorch_model-00001-of-00002.bin'], ['hf']),
    ('checkpoint_00000200', ['checksums.json', 'state/x'], []),
    ('beside', ['config.json', 'model.safetensors', 'checkpoints/notes.txt'], ['hf']),
    ('run', ['checkpoints/checkpoint_00000002/checksums.json', 'experiment.json'], []),
  ],
)
def test_files_tell_the_format(tmp_path, name, files, sources):
  folder = tmp_path / name
  for file in files:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).touch()
  assert [f.source for f in formats_at(str(folder))] == sources
  if name == 'hf':
    assert [f.source for f in formats_at(str(folder / files[1]))] == sources


@pytest.mark.parametrize('path', ['gone', 'x' * 5000, 'a\0b'])
def test_what_is_not_there_has_no_format(path):
  assert formats_at(path) == []


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    (['notes.txt'], 'has no Hugging Face .* Meta'),
    (['a.bin', 'a.safetensors', 'b.pth'], 'several formats: choose --from=meta or --from=hf'),
    (['checksums.json', 'state/x'], "already has paxlite's format:"),
    (['experiment.json'], "already has paxlite's format:"),
    (['checkpoints/checkpoint_00000100/state/x'], 'has no Hugging Face .* Meta'),
  ],
)
def test_an_import_says_what_it_looked_for(tmp_path, files, message):
  for file in files:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
  with pytest.raises(UserError, match=message):
    import_weights.main([str(tmp_path), f'--to={tmp_path / "new"}'])
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('file', ['model.gguf', 'some_package/model.gguf'])
def test_a_gguf_file_goes_by_way_of_transformers(tmp_path, file):
  path = tmp_path / file
  path.parent.mkdir(exist_ok=True)
  path.touch()
  for given in (tmp_path, path):
    with pytest.raises(UserError) as error:
      import_weights.main([str(given), f'--to={tmp_path / "new"}'])
    place = f"from_pretrained('{path.parent}', gguf_file='model.gguf'"
    assert f'AutoModelForCausalLM.{place}' in str(error.value)
    assert f'AutoTokenizer.{place}' in str(error.value)
    assert '\n' not in str(error.value)
  with pytest.raises(UserError, match='--from=gguf was removed: paxlite import FILE shows how'):
    import_weights.main(['--from=gguf', f'--path={path}', f'--to={tmp_path / "new"}'])


@pytest.mark.parametrize('name', ['model.safetensors', 'consolidated.00.pth'])
def test_one_file_of_a_folder_is_refused(tmp_path, name):
  (tmp_path / name).touch()
  with pytest.raises(UserError, match='is one file of a folder: name the folder'):
    import_weights.main([str(tmp_path / name), f'--to={tmp_path / "new"}'])


@pytest.mark.parametrize(
  ('name', 'flags', 'message'),
  [
    ('checkpoint_00000100', [], 'set --fdl_config=EXPERIMENT'),
    ('hf', ['--from=hf', '--fdl_config=TinyGPT'], '--fdl_config is for --from=pax'),
  ],
)
def test_only_checkpoints_of_pax_need_an_experiment(tmp_path, name, flags, message):
  (tmp_path / name).mkdir()
  with pytest.raises(UserError, match=message):
    import_weights.main([str(tmp_path / name), f'--to={tmp_path / "new"}', *flags])
