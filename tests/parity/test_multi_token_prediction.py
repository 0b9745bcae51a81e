"""Modules that predict further tokens, against transformers' MtpModel, and the way back."""

import types

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.generation.engine import Engine
from paxlite.weights import huggingface
from paxlite.weights.commands import export_weights
from paxlite.weights.families import hugging_face_entries
from paxlite.weights.folder import write_weights
from tests.support.families import theirs
from tests.support.imported import loaded, run_import
from tests.support.prediction_folders import (
  WEIGHT,
  D,
  V,
  changed,
  check_gradients,
  check_logits,
  check_loss,
  drop,
  exported,
  gradient,
  ids_of,
  our_logits,
  put_gradients,
  tensors_of,
  their_logits,
  write,
)

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

LAYERS, MODULES = 2, 2


def copies(tensors, i: int) -> dict[str, np.ndarray]:
  """Returns what a module repeats."""
  return {
    f'model.layers.{i}.embed_tokens.weight': tensors['model.embed_tokens.weight'],
    f'model.layers.{i}.shared_head.head.weight': tensors['lm_head.weight'],
  }


@pytest.fixture(scope='module')
def published(tmp_path_factory):
  """Returns a folder as DeepSeek publishes it, and a model with the blocks of the modules, too."""
  path = tmp_path_factory.mktemp('mtp') / 'hf'
  whole = theirs('deepseek_v3', num_hidden_layers=LAYERS + MODULES)
  whole.save_pretrained(path)
  tensors, rng = tensors_of(path), np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.2
  for i in range(LAYERS, LAYERS + MODULES):
    layer = f'model.layers.{i}'
    norms = [f'{layer}.{name}.weight' for name in ('enorm', 'hnorm', 'shared_head.norm')]
    tensors |= {name: 1 + draw(D) for name in norms} | copies(tensors, i)
    tensors[f'{layer}.eh_proj.weight'] = draw(D, 2 * D)
  write(path, tensors, num_hidden_layers=LAYERS, num_nextn_predict_layers=MODULES)
  return types.SimpleNamespace(path=path, whole=whole, tensors=tensors)


@pytest.fixture(scope='module')
def imported(published):
  to = published.path.parent / 'weights'
  run_import('hf', published.path, to)
  return to


def reference(path):
  """Returns transformers' model and its model of the modules."""
  from transformers.modeling_layers import MtpModel

  model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation='eager')
  # its pattern has the number of DeepSeek-V3's layers
  model._keys_to_ignore_on_load_unexpected = [rf'model\.layers\.({LAYERS}|{LAYERS + 1})\..*']
  return model, MtpModel.from_pretrained(model)


def their_gradients(published, model, modules) -> dict[str, np.ndarray]:
  """Returns the gradients by the names of the published tensors."""
  found = put_gradients(published, model, modules, MODULES, LAYERS)
  for i, module in enumerate(modules.layers, LAYERS):
    extra = {'enorm': module.enorm, 'hnorm': module.hnorm, 'eh_proj': module.eh_proj}
    for name, part in (extra | {'shared_head.norm': module.post_norm}).items():
      found[f'model.layers.{i}.{name}.weight'] = gradient(part.weight).numpy()
    found |= copies(found, i)
  return found


def test_logits(published, imported):
  ids = ids_of()[:, :-1]
  with torch.no_grad():
    read = torch.tensor(ids, dtype=torch.long)
    expected = their_logits(*reference(published.path), read, MODULES)
  _, model, params = loaded(imported)
  check_logits(our_logits(model, params, ids), expected)


@pytest.mark.slow
def test_loss_and_gradients(published, imported):
  """The loss is that of equation 25 of DeepSeek-V3, beside the cross-entropy of the next token."""
  model, modules = reference(published.path)
  ids = ids_of()
  logits = their_logits(model, modules, torch.tensor(ids[:, :-1], dtype=torch.long), MODULES)
  experiment, _, params = loaded(imported)
  assert experiment.NUM_PREDICTION_MODULES == MODULES
  assert experiment.PREDICTION_LOSS_WEIGHT == WEIGHT
  found = check_loss(logits, ids, experiment.replaced(AUX_LOSS_COEF=0.0), params)
  learned = [
    entry
    for entry in hugging_face_entries(experiment)
    if not entry.is_copy and not entry.ours.endswith('replaced_bias')
  ]
  check_gradients(found, their_gradients(published, model, modules), learned, 1e-5)
  assert all(name.endswith('replaced_bias') for name in found), found.keys()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_text_with_drafts(published, imported):
  """transformers takes one token of each module, and here the first module alone is used."""
  model, _ = reference(published.path)
  model.config.num_nextn_predict_layers = 1
  ids, new = ids_of()[0].tolist(), 30
  with torch.no_grad():
    out = model.generate(
      torch.tensor([ids]), use_mtp=True, do_sample=False, max_new_tokens=new, eos_token_id=None
    )
  _, ours, params = loaded(imported)
  engine = Engine(ours, params, 64, drafts=True)
  assert engine.continuations([ids], new)[0] == out[0, len(ids) :].tolist()


def test_the_way_back_is_bit_for_bit(published, imported, tmp_path):
  config = exported(published, imported, tmp_path / 'back')
  assert config['num_nextn_predict_layers'] == MODULES
  assert config['num_hidden_layers'] == LAYERS


def test_copies_must_repeat_what_they_are_copies_of(published, tmp_path):
  name = f'model.layers.{LAYERS + 1}.shared_head.head.weight'

  def change(tensors):
    tensors[name] = tensors[name] + np.eye(V, D, dtype=np.float32)

  folder = changed(published, tmp_path / 'other', change)
  with pytest.raises(UserError, match=rf'{name} differs from lm_head.weight'):
    huggingface.read_folder(folder)
  without = changed(
    published, tmp_path / 'none', lambda t: drop(t, 's.2.embed', '3.embed', 'head.head')
  )
  _, entries, _ = huggingface.read_folder(without)
  assert not any(entry.is_copy for entry in entries)


def test_modules_that_are_not_there(published, tmp_path, caplog):
  """transformers states their number, and does not write them."""
  layers = [f'model.layers.{LAYERS + i}.' for i in range(MODULES)]
  folder = changed(published, tmp_path / 'none', lambda tensors: drop(tensors, *layers))
  run_import('hf', folder, tmp_path / 'w')
  assert loaded(tmp_path / 'w')[0].NUM_PREDICTION_MODULES == 0
  lines = [r.getMessage() for r in caplog.records if 'num_nextn_predict_layers=2' in r.getMessage()]
  assert len(lines) == 1
  assert lines[0].endswith('but their tensors are missing: imported without them')

  part = changed(published, tmp_path / 'part', lambda tensors: drop(tensors, layers[1]))
  with pytest.raises(UserError, match=r'model\.layers\.3\..* is missing'):
    run_import('hf', part, tmp_path / 'w2')
  unsaid = changed(published, tmp_path / 'unsaid', lambda _: None, num_nextn_predict_layers=0)
  with pytest.raises(UserError, match=r'model\.layers\.[23]\..* is not in the model'):
    run_import('hf', unsaid, tmp_path / 'w3')


def test_other_families_have_no_names_for_them(tmp_path):
  theirs('qwen2').save_pretrained(tmp_path / 'hf')
  write(tmp_path / 'hf', tensors_of(tmp_path / 'hf'), num_nextn_predict_layers=1)
  with pytest.raises(UserError, match='num_nextn_predict_layers=1 is not supported'):
    huggingface.read_folder(tmp_path / 'hf')


def test_a_family_without_names_for_them_is_exported_without(tmp_path, capsys):
  """The logits of a model do not depend on its modules."""
  model = theirs('qwen2')
  model.save_pretrained(tmp_path / 'hf')
  experiment, entries, tensors = huggingface.read_folder(tmp_path / 'hf')
  experiment = experiment.replaced(NUM_PREDICTION_MODULES=1)
  write_weights(tmp_path / 'w', experiment, entries, tensors, None, lambda done, total: None)
  export_weights.main(['--to=hf', f'--checkpoint={tmp_path / "w"}', f'--path={tmp_path / "back"}'])
  assert 'prediction modules are left out' in capsys.readouterr().out
  before, after = tensors_of(tmp_path / 'hf'), tensors_of(tmp_path / 'back')
  assert before.keys() == after.keys()
  assert 'num_nextn_predict_layers' not in (tmp_path / 'back' / 'config.json').read_text()
