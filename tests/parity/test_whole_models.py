"""Text weights that are written back into models with images, as transformers loads these."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.weights import huggingface
from paxlite.weights.commands import export_weights, import_weights
from paxlite.weights.folder import ORIGIN
from tests.support import runs
from tests.support.image_models import IMAGES, image_inputs, model_with_images, save
from tests.support.imported import loaded, run_import, write_trained

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
safetensors = pytest.importorskip('safetensors.torch')

OTHERS = {  # as they are beside published weights, and no two alike
  'preprocessor_config.json': '{"size": 28}', 'chat_template.jinja': '{{ messages }}',
  'README.md': '# tiny\n', 'assets/logo.svg': '<svg/>', '.gitattributes': '*.safetensors lfs\n',
}  # fmt: skip


def published(folder: pathlib.Path, name: str, dtype='float32', **text) -> pathlib.Path:
  """Writes a model with images in two or more files, with others beside them."""
  model = model_with_images(name, **text).to(getattr(torch, dtype))
  save(model, folder, max_shard_size='40KB')
  assert len([*folder.glob('*.safetensors')]) > 1
  for path, content in OTHERS.items():
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text(content)
  return folder


def export(weights, to, *flags: str) -> None:
  export_weights.main([str(weights), f'--path={to}', *flags])


def trained(folder: pathlib.Path, weights: pathlib.Path, to: pathlib.Path, seed: int) -> set[str]:
  """Writes weights as after a training; returns the names of the tensors that have changed."""
  rng, (_, _, tensors) = np.random.default_rng(seed), huggingface.read_folder(folder)
  changed = {name for name in sorted(tensors.shapes) if rng.random() < 0.5}
  write_trained(folder, weights, to, changed)
  return changed


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = (path for path in sorted(folder.rglob('*')) if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tensors_of(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the bytes of each tensor, by the name of its file and its own."""
  found = {}
  for path in folder.glob('*.safetensors'):
    for tensor in huggingface.tensors_in(str(path)):
      found[f'{path.name} {tensor.name}'] = bytes(tensor.data())
  return found


def logits_of(folder, inputs):
  """Returns the logits of transformers' model, which finds exactly the tensors that it needs."""
  model, info = transformers.AutoModelForImageTextToText.from_pretrained(
    folder, output_loading_info=True, dtype='float32'
  )
  assert not any(info[what] for what in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
  found = []
  is_llama4 = type(model).__name__.startswith('Llama4')
  inner = model.language_model if is_llama4 else model
  inner.register_forward_hook(lambda module, given, output: found.append(output.logits.numpy()))
  # transformers 5.24 cannot return what it has computed of Llama 4
  with torch.no_grad(), contextlib.suppress(*[AttributeError] * is_llama4):
    model.eval()(**inputs)
  return found[0], model


@pytest.mark.cases(fast=1, slow=7)
@pytest.mark.parametrize(
  'name', [n if n == 'Gemma3' else pytest.param(n, marks=pytest.mark.slow) for n in IMAGES]
)
def test_a_text_model_goes_back_into_its_whole_model(name, tmp_path, capsys):
  folder, seed = published(tmp_path / 'hf', name), len(name)
  run_import('hf', folder, tmp_path / 'w')
  export(tmp_path / 'w', tmp_path / 'same')
  assert contents(tmp_path / 'same') == contents(folder)
  assert ' 0 of the ' in capsys.readouterr().out
  before, _ = logits_of(folder, image_inputs(name, seed))
  after, _ = logits_of(tmp_path / 'same', image_inputs(name, seed))
  assert np.array_equal(before, after)
  other, _ = logits_of(folder, image_inputs(name, seed + 1))
  assert not np.allclose(before, other, atol=1e-4)  # the image decides

  changed = trained(folder, tmp_path / 'w', tmp_path / 'tuned', seed)
  export(tmp_path / 'tuned', tmp_path / 'whole')
  assert f' {len(changed)} of the ' in capsys.readouterr().out
  old, new = tensors_of(folder), tensors_of(tmp_path / 'whole')
  assert old.keys() == new.keys()
  assert sum(old[key] != new[key] for key in old) == len(changed)
  drop = lambda found: {k: v for k, v in found.items() if not k.endswith('.safetensors')}
  assert drop(contents(tmp_path / 'whole')) == drop(contents(folder))

  _, ours, params = loaded(tmp_path / 'tuned')
  ids = np.random.default_rng(seed).integers(6, 90, (2, 24))
  with jax.default_matmul_precision('highest'):
    wanted = np.asarray(jax.jit(ours.apply)({'params': params}, ids))
  _, model = logits_of(tmp_path / 'whole', image_inputs(name, seed))
  text = model.language_model if name == 'Llama4' else model  # the whole of Llama 4 wants images
  with torch.no_grad():
    found = text(input_ids=torch.tensor(ids)).logits.numpy()
  assert np.abs(found - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


def test_other_dtypes_names_and_copies_stay(tmp_path, capsys):
  """Names of older files, two dtypes, a copy of the tied embedding; and trained in float32."""
  folder = published(tmp_path / 'first', 'Gemma3', 'bfloat16')
  tensors = {}
  for path in folder.glob('*.safetensors'):
    tensors |= safetensors.load_file(path)
    path.unlink()
  (folder / 'model.safetensors.index.json').unlink()
  (folder / 'consolidated.safetensors').write_bytes(b'other weights')
  head = next(name for name in tensors if name.endswith('embed_tokens.weight'))
  tensors['language_model.lm_head.weight'] = tensors[head].clone()
  rename = lambda name: name.replace('model.language_model.', 'language_model.model.')
  tensors = {rename(name): x.float() if 'norm' in name else x for name, x in tensors.items()}
  safetensors.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt', 'a': 'b'})
  run_import('hf', folder, tmp_path / 'w')
  changed = trained(folder, tmp_path / 'w', tmp_path / 'tuned', 3)
  assert 'model.embed_tokens.weight' in changed
  export(tmp_path / 'tuned', tmp_path / 'whole')
  assert (
    'Left out, because they describe the weights before training: consolidated.safetensors'
    in capsys.readouterr().out
  )
  old, new = (path / 'model.safetensors' for path in (folder, tmp_path / 'whole'))
  size = int.from_bytes(old.read_bytes()[:8], 'little')
  assert old.read_bytes()[: 8 + size] == new.read_bytes()[: 8 + size]
  found = safetensors.load_file(new)
  copy = found['language_model.lm_head.weight']
  assert torch.equal(copy, found['language_model.model.embed_tokens.weight'])
  assert not torch.equal(copy, tensors['language_model.lm_head.weight'])
  for name, tensor in tensors.items():
    is_changed = name.removeprefix('language_model.') in changed or 'lm_head' in name
    assert torch.equal(found[name], tensor) != is_changed, name


@pytest.fixture(scope='module')
def gemma(tmp_path_factory):
  """The folder of a model with images, and its imported text model."""
  place = tmp_path_factory.mktemp('gemma')
  folder = published(place / 'hf', 'Gemma3')
  run_import('hf', folder, place / 'w')
  return folder, place / 'w'


def changed_json(path: pathlib.Path, **values) -> None:
  found = json.loads(path.read_text())
  path.write_text(json.dumps(found | values))


def gone(folder, weights):
  shutil.rmtree(folder)


def other_images(folder, weights):
  path = next(p for p in sorted(folder.glob('*.safetensors')) if b'vision_tower' in p.read_bytes())
  tensors = safetensors.load_file(path)
  name = next(n for n in tensors if 'vision_tower' in n)
  tensors[name] = tensors[name] + 1
  safetensors.save_file(tensors, path, metadata={'format': 'pt'})


def other_config(folder, weights):
  changed_json(folder / 'config.json', transformers_version='0')


def longer(folder, weights):
  found = json.loads((weights / 'experiment.json').read_text())
  found['values']['MAX_POSITION_EMBEDDINGS'] = 128
  (weights / 'experiment.json').write_text(json.dumps(found))
  write_checksums(weights)


def linked(folder, weights):
  (folder.parent / 'secret').write_text('x')
  (folder / 'notes.txt').symlink_to(folder.parent / 'secret')


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (gone, 'hf, the model with images to write into, does not exist:'),
    (other_images, r'has changed since its text model was imported \(different tensors outside'),
    (other_config, r'imported \(another config.json\)'),
    (longer, 'has max_position_embeddings=64, but here it is 128'),
    (linked, 'notes.txt is a link out of its folder'),
  ],
)
def test_what_does_not_fit_is_refused_in_one_line(gemma, tmp_path, change, message):
  folder, weights = tmp_path / 'hf', tmp_path / 'w'
  shutil.copytree(gemma[0], folder)
  shutil.copytree(gemma[1], weights)
  changed_json(weights / ORIGIN, folder=str(folder))
  change(folder, weights)
  with pytest.raises(UserError, match=message) as error:
    export(weights, tmp_path / 'out')
  assert '\n' not in str(error.value)
  assert not (tmp_path / 'out').exists()
  assert {p.name for p in tmp_path.iterdir()} <= {'hf', 'w', 'secret'}
  export(weights, tmp_path / 'text', '--text_only')
  config = json.loads((tmp_path / 'text/config.json').read_text())
  assert config['architectures'] == ['Gemma3ForCausalLM']
  if change in (gone, other_images, other_config):
    export(weights, tmp_path / 'moved', f'--into={gemma[0]}')
    assert contents(tmp_path / 'moved') == contents(gemma[0])


@pytest.mark.parametrize(
  'flags', [('--dtype=bfloat16',), ('--to=gguf', '--into=x'), ('--text_only', '--into=x')], ids=str
)
def test_flags_that_exclude_each_other(gemma, tmp_path, flags):
  with pytest.raises(UserError, match='--text_only'):
    export(gemma[1], tmp_path / 'out', *flags)
  assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_new_tokens_and_no_secrets_go_back(tmp_path):
  """The tokenizer is that of the weights, and hidden files stay where they are."""
  from tests.unit.weights.test_adapters import tokenizer_in

  folder = published(tmp_path / 'hf', 'Gemma3')
  tokenizer_in(folder)
  (folder / '.env').write_text('SECRET=1')
  import_weights.main([str(folder), f'--to={tmp_path / "w"}', '--add_tokens=<a>'])
  export(tmp_path / 'w', tmp_path / 'out')
  vocabulary = json.loads((tmp_path / 'out/tokenizer.json').read_text())
  assert '<a>' in [token['content'] for token in vocabulary['added_tokens']]
  files, before = contents(tmp_path / 'out'), contents(folder)
  differing = {name for name in before if files.get(name) != before[name]}
  assert '.env' not in files
  assert {n for n in differing if not n.endswith('.safetensors')} <= {
    '.env', 'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json',
  }  # fmt: skip


@pytest.mark.slow
def test_a_kill_leaves_nothing_half(gemma, tmp_path):
  folder, out, half = tmp_path / 'hf', tmp_path / 'out', tmp_path / '.out.unfinished'
  shutil.copytree(gemma[0], folder)
  with (folder / 'video.mp4').open('wb') as f:
    f.truncate(1 << 30)  # takes a second to copy
  words = ['export', str(gemma[1]), f'--into={folder}', f'--path={out}']
  process = subprocess.Popen([sys.executable, '-m', 'paxlite', *words], env=runs.environment())
  while not half.exists() and process.poll() is None:
    time.sleep(0.001)
  os.kill(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  assert half.exists()
  assert not out.exists()
  (folder / 'video.mp4').write_bytes(b'short')
  export(gemma[1], out, f'--into={folder}')
  assert contents(out) == contents(folder)
  assert not half.exists()


@pytest.mark.slow
@pytest.mark.parametrize('method', ['sft', 'lora'])
def test_a_fine_tuning_goes_back_with_a_proof(method, tmp_path):
  folder, run, out = tmp_path / 'hf', tmp_path / 'run', tmp_path / 'out'
  published(folder, 'Gemma3', 'bfloat16', vocab_size=8192, max_position_embeddings=128)
  shutil.copyfile(packaged.VOCAB, folder / 'tokenizer.model')
  run_import('hf', folder, tmp_path / 'w')
  data = tmp_path / 'data.jsonl'
  data.write_text('{"inputs": "alpha goes before", "targets": " beta"}\n' * 8)
  settings = (
    'MAX_SEQ_LEN=32', 'PERCORE_BATCH_SIZE=2', 'MAX_STEPS=2', 'EVAL_INTERVAL_STEPS=100',
    'ICI_MESH_SHAPE=[1,1,1]', 'DCN_MESH_SHAPE=[1,1,1]', 'LEARNING_RATE=1e-2', 'LR_COS_WARMUP=1',
  )  # fmt: skip
  for words in (
    ('finetune', str(tmp_path / 'w'), f'--method={method}', f'--folder={run}',
     f'TRAIN_FILES={data}', *settings),
    ('export', str(run), f'--path={out}', '--proof'),
  ):  # fmt: skip
    result = runs.ended([sys.executable, '-m', 'paxlite', *words], runs.environment())
    assert result.returncode == 0, result.stderr
  assert f'The whole model of {folder}: ' in result.stdout
  old, new = tensors_of(folder), tensors_of(out)
  different = {key.partition(' ')[2] for key in old if old[key] != new[key]}
  assert different
  assert all('language_model' in name for name in different)
  if method == 'lora':
    assert all(name.endswith('_proj.weight') for name in different)
  result = runs.ended([sys.executable, '-m', 'paxlite', 'prove', str(out)], runs.environment())
  assert result.returncode == 0, result.stderr
  # the run's weights are in float32, and the file's in bfloat16, as they came
  assert 'It is the model of the proof, within rounding' in result.stdout
  logits_of(out, image_inputs('Gemma3', 0))
