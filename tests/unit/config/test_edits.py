"""Values of the built config that a command line sets by their paths."""

import json
import random

import fiddle as fdl
import pytest

from paxlite import main
from paxlite.config.edits import edited
from paxlite.config.experiment_file import WeightsFacts
from paxlite.config.templates import config_text, nodes
from paxlite.core.errors import UserError
from paxlite.experiments import compatibility, identity
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.finetuning import HuggingFacePreferences
from paxlite.experiments.registry import experiments
from paxlite.finetuning.distillation.experiment import Distillation
from paxlite.programs.launch import build_experiment
from paxlite.tools import show
from tests.support import runs

DROPOUT = 'task.model.transformer_tpl.layer_tpl.dropout'
CAP = 'task.model.logit_cap'
DECAY = 'task.optimizer.transformation.weight_decay'


class Student(Distillation, TinyGPT):
  pass


def built(name: str) -> fdl.Config:
  return build_experiment(name, [], {}).build_task()


def other(value: object) -> object:
  """Returns another value of the same type; None where there is none that fits surely."""
  if isinstance(value, bool):
    return not value
  return value + 1 if isinstance(value, int | float) else None


@pytest.mark.parametrize('seed', range(3))
def test_every_leaf_is_accepted_back_and_changes_nothing_else(seed):
  rng = random.Random(seed)
  name = rng.choice([n for n in experiments() if not n.startswith('HuggingFace')])
  task = built(name)
  text = config_text(task)
  leaves = [line.split(' = ', 1) for line in text.splitlines() if ' = ' in line]
  assert len(leaves) > 50, name
  words = [f'{rng.choice(["", "--fdl."])}{path}={value}' for path, value in leaves]
  given = show.PARSER.parsed([name, *words]).attributes
  assert config_text(build_experiment(name, [], given).build_task()) == text
  for node in rng.sample(list(nodes(task)), 40):
    if not node.is_config and (changed := other(node.value)) is not None:
      lines = [f'{node.path} = {changed!r}' if x == str(node) else x for x in text.splitlines()]
      assert config_text(edited(task, [f'{node.path}={changed}'])).splitlines() == lines
  assert config_text(task) == text


@pytest.mark.parametrize(
  ('edit', 'message'),
  [
    ('task.modl.logit_cap=1', r'task\.modl\.logit_cap is not in .* Did you mean task\.model\?'),
    (f'{DROPOUT[:-1]}=1', rf'Did you mean {DROPOUT}\?'),
    ('task.dropout=1', rf'Did you mean .* or {DROPOUT} or '),
    ('task.optimizer.xyz=1', r'task\.optimizer has average_decay, by_layer, clip_gradient_norm'),
    ('task.losses.avg_xen.coefficient=1', r'Did you mean task\.losses\.avg_xent\?'),
    ('train_input.seed=1', r'train_input\.seed is not in .* Paths begin with task\.'),
    (f'{DROPOUT}=much', f'--fdl.{DROPOUT}=much: the value must be float, and is 0.0 now'),
    ('task.model.norm_tpl=x', r'set one of them \(paxlite show EXPERIMENT --path=task\.mod'),
    ('task.model.head_tpl=x', 'the value must be None'),
    ('task.model.prediction_tpls=[1]', r'the value must be \[\]'),
    (CAP, 'the value must be float'),
    ('task.num_microbatches=0', 'task.num_microbatches=0: the value must be at least 1'),
    ('task.rows_per_example=0', 'must be at least 1'),
    ('task.max_skipped_steps=-1', 'must '),
    (f'{DECAY}=-1', 'must not be negative'),
    ('task.model.embedding_tpl.vocab_size=0', 'must be at least 1'),
    ('task.model.embedding_tpl.dtype=abc', 'must be one of bfloat16, float16, float32'),
    ('task.gradient_dtype=int4', 'must be one of bfloat16'),
    ('task.optimizer.moments_dtype=abc', 'must be one of .*, int8'),
    ('task.frozen_dtype=abc', 'must be one of bfloat16'),
  ],
)
def test_a_path_that_is_not_there_is_refused_in_one_line(edit, message, capsys):
  path, _, text = edit.partition('=')
  with pytest.raises(UserError, match=message):
    build_experiment('TinyGPT', [], {path: text})
  with pytest.raises(UserError, match=message):
    build_experiment('TinyGPT', [], {'CONFIG_EDITS': repr([edit])})
  assert main.main(['paxlite', '--fdl_config=TinyGPT', '--dry_run', f'--fdl.{path}={text}']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ')


def test_values_have_the_types_of_their_fields():
  e = build_experiment('TinyGPT', [], {
    CAP: '30', 'task.optimizer.trainable': 'embedding/.*,head/.*',
    'task.model.transformer_tpl.layer_tpl.attention_tpl.attention_tpl.sink_logit': '1',
  })  # fmt: skip
  task = e.build_task()
  assert (task.model.logit_cap, type(task.model.logit_cap)) == (30.0, float)
  assert task.optimizer.trainable == ('embedding/.*', 'head/.*')
  assert task.model.transformer_tpl.layer_tpl.attention_tpl.attention_tpl.sink_logit == 1.0
  assert fdl.build(task).model.logit_cap == 30.0


def test_edits_of_a_class_a_run_and_a_command_are_one_list():
  class Edited(TinyGPT):
    CONFIG_EDITS = [f'{CAP}=30', f'{DECAY}=0.5']

  name = f'{__name__}.{Edited.__name__}'
  globals()[Edited.__name__] = Edited
  Edited.__qualname__ = Edited.__name__
  first = build_experiment(name, [], {DECAY: '0.25'})
  assert list(first.CONFIG_EDITS) == [f'{CAP}=30', f'{DECAY}=0.25']
  run = json.loads(json.dumps(identity.identity_of(first)))
  again = build_experiment(name, [], {DROPOUT: '0.1'}, run)
  assert list(again.CONFIG_EDITS) == [f'{CAP}=30', f'{DROPOUT}=0.1', f'{DECAY}=0.25']
  assert build_experiment(name, [], {'CONFIG_EDITS': '[]'}, run).CONFIG_EDITS == []


def test_a_model_of_other_layers_takes_the_edits_that_it_can():
  unrolled = {'task.model.transformer_tpl.unrolled_on': '[cpu]', CAP: '20'}
  e = build_experiment('TinyGPT', [], {'USE_REPEATED_LAYER': 'True', **unrolled})
  task = e.replaced(**e.decoding_values).build_task()
  assert 'unrolled_on' not in task.model.transformer_tpl.__arguments__
  assert task.model.logit_cap == 20.0


@pytest.mark.parametrize('backend', [
  {}, {'USE_FP8': 'True'}, {'USE_INT8': 'forward'},
  {'USE_INT8': 'forward_backward', 'USE_REPEATED_LAYER': 'True'},
])  # fmt: skip
def test_a_model_on_any_backend_continues_text_with_its_edits(backend):
  task, rng = build_experiment('TinyGPT', [], backend).build_task(), random.Random(0)
  model = task.model.model if 'USE_INT8' in backend else task.model
  root = 'task.model.model' if 'USE_INT8' in backend else 'task.model'
  leaves = [node for node in nodes(model, root) if type(node.value) is float]
  given = {node.path: str(node.value + 1) for node in rng.sample(leaves, 8)}
  e = build_experiment('TinyGPT', [], backend | given)
  plain = config_text(e.plain.replaced(**e.decoding_values).build_task()).splitlines()
  for path, text in given.items():
    assert f'{path.replace(root, "task.model")} = {text}' in plain


@pytest.mark.parametrize('values', [
  {}, {'USE_LORA': True}, {'USE_INT8': 'forward'}, {'USE_REPEATED_LAYER': False},
])  # fmt: skip
@pytest.mark.parametrize('kind', ['reference', 'teacher', 'precomputed'])
def test_a_frozen_model_has_the_edits_of_its_run(kind, values, tmp_path):
  is_wrapped = 'USE_INT8' in values
  root = 'task.model.model' if is_wrapped else 'task.model'
  ends = 'logit_cap', 'transformer_tpl.layer_tpl.attention_tpl.attention_tpl.logit_cap'
  given = [f'{root}.{end}={7.5 + n}' for n, end in enumerate(ends)]
  if kind == 'teacher':
    values = {k: v for k, v in values.items() if k != 'USE_LORA'}
    identity.write_configuration(TinyGPT(CONFIG_EDITS=given, **values), tmp_path)
    stored = identity.run_values(tmp_path)
    facts = WeightsFacts(str(tmp_path), stored['experiment'], stored['values'])
    frozen = (
      Student(TEACHER=str(tmp_path)).knowing(WeightsFacts(), facts).build_task().reference.model
    )
  else:
    e = HuggingFacePreferences(MODEL='SmolLM135M', CONFIG_EDITS=given, **values)
    e = e.replaced(PRECOMPUTE_REFERENCE=True).with_reference if kind == 'precomputed' else e
    frozen = e.build_task().reference.model
  lines = config_text(frozen).splitlines()
  for n, end in enumerate(ends):
    assert f'task.{end} = {7.5 + n}' in lines
  fdl.build(frozen)


def test_what_has_no_effect_is_said():
  e = build_experiment('TinyGPT', [], {DROPOUT: '0.0'})
  assert any('CONFIG_EDITS=' in w and 'changes nothing' in w for w in e.warnings)
  e = build_experiment('TinyGPT', [], {CAP: '30', 'SOFTMAX_CAP_LOGITS': '20'})
  assert any('SOFTMAX_CAP_LOGITS=20.0 changes nothing' in w for w in e.warnings)


def test_show_prints_a_part_of_the_built_config(capsys):
  show.main(['TinyGPT', '--path=task.optimizer', f'{DECAY}=0.5'])
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'task.optimizer: paxlite.optim.optimizers.Optimizer'
  assert all(line.startswith('task.optimizer') for line in lines)
  assert f'{DECAY} = 0.5' in lines
  show.main(['TinyGPT', '--path=train_input.source.seed'])
  assert capsys.readouterr().out == 'train_input.source.seed = 0\n'
  show.main(['TinyGPT', '--path=task.losses'])
  assert 'task.losses.avg_xent.coefficient = 1.0' in capsys.readouterr().out
  for path, meant in {
    'task.optimzer': 'Did you mean task.optimizer?',
    'train_input.sorce': 'Did you mean train_input.source?',
    'model': 'Paths begin with task.',
  }.items():
    with pytest.raises(UserError, match=meant.replace('?', r'\?')):
      show.main(['TinyGPT', f'--path={path}'])


@pytest.mark.slow
def test_a_run_keeps_its_edits(tmp_path):
  edits = f'{CAP}=15', f'{DECAY}=0.5'
  folder, plain = tmp_path / 'edited', tmp_path / 'plain'
  runs.run(plain, '--fdl.MAX_STEPS=4')
  for steps in (2, 4):
    runs.run(folder, *(f'--fdl.{edit}' for edit in edits), f'--fdl.MAX_STEPS={steps}')
  assert runs.losses(folder).keys() == runs.losses(plain).keys()
  assert runs.losses(folder) != runs.losses(plain)
  values = json.loads((folder / 'experiment.json').read_text())['values']
  assert values['CONFIG_EDITS'] == list(edits)
  refused = runs.run(folder, '--fdl.MAX_STEPS=6', code=2).stderr
  assert f'CONFIG_EDITS {list(edits)} → []' in refused
  run = identity.run_values(folder)
  e = build_experiment('TinyGPT', [], {}, run)
  assert e.build_task().model.logit_cap == 15.0
  with pytest.raises(UserError, match=r'CONFIG_EDITS=.* change what the model computes.*logit_cap'):
    compatibility.refuse_edited_model(e)
  compatibility.refuse_edited_model(e.replaced(CONFIG_EDITS=[f'{DECAY}=0.5', f'{DROPOUT}=0.1']))
