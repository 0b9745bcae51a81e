"""The module of Qwen3.5 and Qwen3-Next that predicts a further token, against transformers.

transformers leaves it out when it reads a model. Its MtpModel computes it, once the config states
that there is one with full attention: it reads the same names of tensors in files of Mellum.
"""

import json
import types

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.weights import huggingface
from paxlite.weights.commands import export_weights
from paxlite.weights.families import hugging_face_entries
from tests.support.families import theirs
from tests.support.imported import loaded, run_import, variables_of, write_trained
from tests.support.prediction_folders import (
  D,
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

FAMILIES = ('qwen3_5_text', 'qwen3_5_moe_text', 'qwen3_next')
TYPES = ['linear_attention', 'full_attention']
LAYERS = len(TYPES)
NORMS = {
  'mtp.pre_fc_norm_embedding': 'enorm', 'mtp.pre_fc_norm_hidden': 'hnorm', 'mtp.norm': 'post_norm',
}  # fmt: skip


def published_folder(path, family: str):
  """Writes a folder as Qwen publishes it; returns the model that has the module's block too."""
  whole = theirs(family, num_hidden_layers=LAYERS + 1, layer_types=[*TYPES, 'full_attention'])
  whole.save_pretrained(path)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.2
  rename = lambda name: name.replace(f'model.layers.{LAYERS}.', 'mtp.layers.0.')
  tensors = {rename(name): x for name, x in tensors_of(path).items()}
  tensors |= {f'{name}.weight': draw(D) for name in NORMS}
  tensors['mtp.fc.weight'] = draw(D, 2 * D)
  stated = {} if family == 'qwen3_next' else dict(mtp_num_hidden_layers=1)
  write(path, tensors, num_hidden_layers=LAYERS, layer_types=TYPES, **stated)
  return types.SimpleNamespace(path=path, whole=whole, tensors=tensors, family=family)


@pytest.fixture(scope='module', params=FAMILIES)
def published(request, tmp_path_factory):
  return published_folder(tmp_path_factory.mktemp(request.param) / 'hf', request.param)


@pytest.fixture(scope='module')
def imported(published):
  to = published.path.parent / 'weights'
  run_import('hf', published.path, to)
  return to


def reference(path):
  """Returns transformers' model and its model of the module."""
  from transformers.modeling_layers import MtpModel

  model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation='eager')
  model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ['full_attention']
  return model, MtpModel.from_pretrained(model)


def their_gradients(published, model, module) -> dict[str, np.ndarray]:
  """Returns the gradients by the names of the published tensors."""
  found = {
    name.replace(f'model.layers.{LAYERS}.', 'mtp.layers.0.'): x
    for name, x in put_gradients(published, model, module, 1, LAYERS).items()
  }
  own = {f'{name}.weight': getattr(module.layers[0], norm) for name, norm in NORMS.items()}
  own['mtp.fc.weight'] = module.layers[0].eh_proj
  return found | {name: gradient(part.weight).numpy() for name, part in own.items()}


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
def test_logits_loss_and_gradients(published, imported):
  model, module = reference(published.path)
  ids = ids_of()
  logits = their_logits(model, module, torch.tensor(ids[:, :-1], dtype=torch.long), 1)
  experiment, ours, params = loaded(imported)
  assert experiment.NUM_PREDICTION_MODULES == 1
  check_logits(our_logits(ours, params, ids[:, :-1]), logits)

  off = {} if published.family == 'qwen3_5_text' else dict(AUX_LOSS_COEF=0.0)
  found = check_loss(logits, ids, experiment.replaced(**off), params)
  gradients = their_gradients(published, model, module)
  check_gradients(found, gradients, hugging_face_entries(experiment), 1e-4)
  assert not found, found.keys()


@pytest.mark.cases(fast=1, slow=3)
def test_the_way_back_is_bit_for_bit(published, imported, tmp_path):
  config = exported(published, imported, tmp_path / 'back')
  assert config['mtp_num_hidden_layers'] == 1
  assert config['mtp_use_dedicated_embeddings'] is False
  assert config['num_hidden_layers'] == LAYERS


def test_modules_that_are_not_there(published, tmp_path, caplog):
  """transformers writes the number of Qwen3.5's modules, and not their tensors."""
  folder = changed(published, tmp_path / 'none', lambda tensors: drop(tensors, 'mtp.'))
  experiment, _, _ = huggingface.read_folder(folder)
  assert experiment.NUM_PREDICTION_MODULES == 0
  lines = [r.getMessage() for r in caplog.records]
  if published.family == 'qwen3_next':
    assert not lines
  else:
    assert [line.partition('config.json ')[2] for line in lines] == [
      'says mtp_num_hidden_layers=1, but their tensors are missing: imported without them'
    ]
  part = changed(published, tmp_path / 'part', lambda tensors: drop(tensors, 'mtp.fc.'))
  with pytest.raises(UserError, match=r'mtp\.fc\.weight is missing'):
    run_import('hf', part, tmp_path / 'w')


REFUSED = {
  'two': (dict(mtp_num_hidden_layers=2), 'mtp_num_hidden_layers=2 is not supported: such mod'),
  'dedicated': (
    dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True),
    'mtp_use_dedicated_embeddings=True is not supported: the module reads the embedding of',
  ),
  'text': (dict(mtp_num_hidden_layers='1'), "mtp_num_hidden_layers='1' must be an integer"),
  'text of a choice': (
    dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings='false'),
    "mtp_use_dedicated_embeddings='false' is not supported",
  ),
}


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  return published_folder(tmp_path_factory.mktemp('dense') / 'hf', 'qwen3_5_text')


@pytest.mark.parametrize('case', REFUSED)
def test_refusals(dense, tmp_path, case):
  config, message = REFUSED[case]
  with pytest.raises(UserError, match=message) as e:
    huggingface.read_folder(changed(dense, tmp_path / 'hf', lambda _: None, **config))
  assert '\n' not in str(e.value)


def test_a_second_module_is_refused_on_export(dense):
  experiment, _, _ = huggingface.read_folder(dense.path)
  with pytest.raises(UserError, match='Hugging Face has no NUM_PREDICTION_MODULES=2 in this fam'):
    huggingface.config_json(experiment.replaced(NUM_PREDICTION_MODULES=2), 'float32', None)


def test_the_block_has_attention_where_the_last_one_of_the_model_has_none(dense):
  experiment, _, _ = huggingface.read_folder(dense.path)
  changed = experiment.replaced(ATTENTION_PATTERN=['full', 'gated_delta'])
  assert changed.block_kinds[-1].attention == 'gated_delta'
  assert changed.prediction_kind.attention == 'full'


@pytest.mark.parametrize('packed', ['blocks', 'module', 'both'])
def test_a_file_with_images_whose_experts_are_packed(tmp_path, packed):
  """As Qwen publishes its mixtures; the module's experts are one tensor each there."""
  family = 'qwen3_5_moe_text'
  plain = published_folder(tmp_path / 'hf', family)
  kept = {'blocks': 'mtp.', 'module': 'model.', 'both': '-'}[packed]

  def change(tensors):
    stems = {n.partition('.0.gate_proj')[0] for n in tensors if '.experts.0.gate_proj' in n}
    each = lambda stem, role: [tensors.pop(f'{stem}.{x}.{role}_proj.weight') for x in range(8)]
    for stem in (s for s in stems if not s.startswith(kept)):
      gates, ups, downs = (np.stack(each(stem, role)) for role in ('gate', 'up', 'down'))
      tensors[f'{stem}.gate_up_proj'] = np.concatenate([gates, ups], 1)
      tensors[f'{stem}.down_proj'] = downs
    for name in [n for n in tensors if n.startswith('model.')]:
      tensors[name.replace('model.', 'model.language_model.', 1)] = tensors.pop(name)
    tensors['model.visual.patch_embed.proj.weight'] = np.ones((2, 2), np.float32)

  folder = changed(plain, tmp_path / 'packed', change)
  text = json.loads((folder / 'config.json').read_text())
  outer = dict(model_type='qwen3_5_moe', tie_word_embeddings=text['tie_word_embeddings'])
  (folder / 'config.json').write_text(json.dumps(outer | {'text_config': text}))
  experiment, entries, tensors = huggingface.read_folder(folder)
  assert experiment.NUM_PREDICTION_MODULES == 1
  before, after, whole = huggingface.read_folder(plain.path)
  assert before.model_values == experiment.model_values
  wanted = variables_of(after, whole.read)
  found = variables_of(entries, tensors.read)
  assert found.keys() == wanted.keys()
  for name, value in wanted.items():
    assert np.array_equal(found[name], value), name
  run_import('hf', folder, tmp_path / 'w')
  changed_names = {name for name in tensors.shapes if 'mtp.' in name or 'gate_up' in name}
  write_trained(folder, tmp_path / 'w', tmp_path / 'tuned', changed_names)
  export_weights.main([str(tmp_path / 'tuned'), f'--path={tmp_path / "whole"}'])
  of_files = [tensors_of(place) for place in (folder, tmp_path / 'whole')]
  different = {n for n, x in of_files[0].items() if not np.array_equal(x, of_files[1][n])}
  assert {n.replace('.language_model', '') for n in different} == changed_names
  del text['mtp_num_hidden_layers']  # the tensors say it, too
  (folder / 'config.json').write_text(json.dumps(outer | {'text_config': text}))
  assert huggingface.read_folder(folder)[0].NUM_PREDICTION_MODULES == 1


def test_too_few_tensors_for_packed_experts(tmp_path):
  folder = published_folder(tmp_path / 'hf', 'qwen3_5_moe_text').path
  write(folder, tensors_of(folder), num_experts=9999)
  with pytest.raises(UserError, match='tensors are too few for NUM_EXPERTS=9,999 in 2 layers'):
    huggingface.read_folder(folder)
