"""Runs one step of each registered experiment at a small size, and checks its attributes."""

import re
import sys

import fiddle as fdl
import pytest
from fiddle import selectors

from paxlite.config.attribute_kinds import Kind, kind_of
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError
from paxlite.experiments import registry
from paxlite.experiments.base import Experiment
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import requirements
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.registry import experiments, find, register
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.programs.run import Run
from paxlite.report.commands import diff

NAMES = list(experiments())

SHRUNK = dict(
  NUM_LAYERS=1, NUM_HEADS=2, NUM_KV_HEADS=2, MODEL_DIMS=16, DIMS_PER_HEAD=8, HIDDEN_DIMS=32,
  MAX_SEQ_LEN=16, ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1], PERCORE_BATCH_SIZE=2,
  MAX_STEPS=1, MAX_EVAL_BATCHES=1, SUMMARY_INTERVAL_STEPS=1,
)  # fmt: skip


WITHOUT_FILES = [n for n in NAMES if re.match('Synthetic|Demo|Tiny', n)]
FAMILIES = [
  'GPT2', 'paxlite.experiments.llama.LLaMA7B', 'LLaMA3_2_1B', 'Mistral7B', 'Gemma2B', 'Seqax84M',
]  # fmt: skip


QUICK = {'TinyGPT'}


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  'name',
  [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WITHOUT_FILES + FAMILIES],
)
def test_one_small_step(name, tmp_path):
  cls = find(name)
  if name in FAMILIES:
    cls = type(f'Synthetic{cls.__name__}', (Synthetic, cls), {})
  cfg = cls.config()
  experts = dict(NUM_LAYERS=2, NUM_EXPERTS=4) if hasattr(cls, 'NUM_EXPERTS') else {}
  for attribute, value in (SHRUNK | experts).items():
    setattr(cfg, attribute, value)
  experiment = fdl.build(cfg)
  experiment.validate()
  trainer = Run(experiment, tmp_path, save=False).trainer()
  state = trainer.train(*trainer.store.initial())
  assert int(state.step) == 1
  assert int(state.skipped) == 0


@pytest.mark.parametrize('name', NAMES)
def test_the_docstring_starts_with_the_command(name):
  first = find(name).__doc__.splitlines()[0]
  assert first.startswith(f'python -m paxlite.main --fdl_config={name} ')


def test_dotted_and_bare_names_find_the_same():
  assert find('GPT126M') is find('paxlite.experiments.gpt.GPT126M') is GPT126M


def test_two_experiments_of_one_name_are_an_error():
  with pytest.raises(UserError, match='GPT126M is registered by'):
    register(type('GPT126M', (Experiment,), {}))


@pytest.mark.parametrize('first', ['user', 'paxlite'])
def test_a_name_of_paxlite_is_taken_whatever_registers_first(first, monkeypatch):
  taken = find('DemoGPT')
  mine = type('DemoGPT', (Experiment,), {'__module__': 'mine.configs'})
  message = (
    'an experiment DemoGPT is registered by paxlite.experiments.demo already: '
    'rename the one in mine.configs'
  )
  if first == 'paxlite':
    with pytest.raises(UserError, match=message):
      register(mine)
    assert find('DemoGPT') is taken
    return
  # As if paxlite's module were not imported yet; all others are, so that none is missing later.
  others = {name: cls for name, cls in experiments().items() if cls is not taken}
  monkeypatch.setattr(registry, '_REGISTRY', others)
  monkeypatch.delitem(sys.modules, taken.__module__)
  register(mine)
  for look in (lambda: find('DemoGPT'), experiments):
    with pytest.raises(UserError, match=message):
      look()


def classes(cls: type) -> set[type]:
  return {cls}.union(*map(classes, cls.__subclasses__()))


def test_every_attribute_says_what_it_decides():
  experiments()  # imports all experiments
  ours = {cls for cls in classes(Experiment) if cls.__module__.startswith('paxlite.')}
  assert len(ours) > 80
  without = {
    (cls.__name__, name)
    for cls in ours
    for name, annotation in attribute_types(cls).items()
    if kind_of(annotation) is None
  }
  assert without == set()


def test_a_kind_is_inherited_and_bounds_are_checked():
  class Mine(TinyGPT):
    MAX_STEPS: int = 7
    MY_OWN: int = 3

  kinds = {name: kind_of(annotation) for name, annotation in attribute_types(Mine).items()}
  assert kinds['MAX_STEPS'] is Kind.RUN
  assert kinds['MY_OWN'] is None
  for values, message in (
    (dict(NUM_LAYERS=0), 'NUM_LAYERS=0 must be at least 1'),
    (dict(DROPOUT_PROB=1.0), 'DROPOUT_PROB=1 must be at least 0 and below 1'),
    (dict(LR_COS_MIN_RATIO=1.5), 'LR_COS_MIN_RATIO=1.5 must be from 0 to 1'),
    (dict(STEP_TIMEOUT=-1.0), 'STEP_TIMEOUT=-1 must not be negative; 0 turns it off'),
    (dict(MAX_EVAL_BATCHES=0), 'MAX_EVAL_BATCHES=0 must be at least 1'),
    (dict(SEED=1 << 32), 'SEED=4294967296 must be from 0 to'),
    (
      dict(USE_ROTARY_POSITION_EMB=True, NUM_HEADS=32),
      'need an even DIMS_PER_HEAD, above 0, not 1',
    ),
  ):
    with pytest.raises(UserError, match=message):
      Mine(**values).validate()


@pytest.mark.parametrize(
  ('values', 'unrolled'),
  [
    (dict(CHECKPOINT_POLICY='SAVE_DOT_AND_ATTENTION'), ['gpu']),
    (dict(CHECKPOINT_POLICY='SAVE_QKV_CONTEXT_OUT_PROJ', ICI_MESH_SHAPE=[2, 4, 1]), ['gpu']),
    (dict(CHECKPOINT_POLICY='SAVE_ATTENTION'), []),
    (dict(CHECKPOINT_POLICY='SAVE_DOT_ONLY', USE_TE='gemm'), []),
    (dict(CHECKPOINT_POLICY='SAVE_DOT_ONLY', ICI_MESH_SHAPE=[1, 4, 2]), []),
    (dict(CHECKPOINT_POLICY='SAVE_DOT_ONLY', OFFLOAD_ACTIVATIONS=['iteration_input']), []),
    (dict(CHECKPOINT_POLICY='SAVE_NOTHING', UNROLL_LAYERS=['gpu', 'tpu']), ['gpu', 'tpu']),
  ],
)
def test_repeated_layers_are_unrolled_where_that_is_faster(values, unrolled):
  e = TinyGPT(USE_REPEATED_LAYER=True, **values)
  assert unrolled == e.UNROLL_LAYERS
  assert e.model().transformer_tpl.unrolled_on == unrolled
  assert [e.scatters_each_gradient(p) for p in ('cuda', 'tpu')] == [
    k in unrolled for k in ('gpu', 'tpu')
  ]
  assert e.replaced(USE_REPEATED_LAYER=False).scatters_each_gradient('tpu') == (
    e.mesh_sizes['mdl'] == 1
  )


def test_experts_and_stages_stay_in_a_loop():
  values = dict(USE_REPEATED_LAYER=True, CHECKPOINT_POLICY='SAVE_DOT_ONLY')
  experts = GLaM126M64E(**values)
  assert experts.UNROLL_LAYERS == []
  assert not experts.replaced(USE_REPEATED_LAYER=False).scatters_each_gradient('cuda')
  axes = dict(MESH_AXES=['stage', 'replica', 'data', 'mdl'], DCN_MESH_SHAPE=[1, 1, 1, 1])
  stages = TinyGPT(**values, **axes, ICI_MESH_SHAPE=[2, 1, 1, 1], NUM_LAYERS=2)
  assert stages.UNROLL_LAYERS == []
  stages.validate()
  with pytest.raises(UserError, match=r"stage\) needs 'UNROLL_LAYERS=\[\]'"):
    stages.replaced(UNROLL_LAYERS=['gpu']).validate()


def test_a_selection_of_nothing_is_an_error():
  """It would train the model as it was."""

  class Gated(TinyGPT):
    def model(self):
      model = super().model()
      selectors.select(model, GatedFeedForward).set(hidden_dims=3)
      return model

  class Plain(TinyGPT):
    def model(self):
      model = super().model()
      selectors.select(model, FeedForward).set(hidden_dims=3)
      return model

  with pytest.raises(UserError, match=r'Gated: selectors.select finds no .*GatedFeedForward'):
    Gated().build_task()
  layer = Plain().build_task().model.transformer_tpl.layer_tpl
  assert layer.ffn_tpl.hidden_dims == 3


def test_each_pattern_of_trainable_variables_matches(tmp_path):
  experiment = TinyGPT(TRAINABLE_VARIABLES=['.*', 'nothing'], NUM_LAYERS=1)
  with pytest.raises(UserError, match="TRAINABLE_VARIABLES: 'nothing' matches no whole variable"):
    Run(experiment, tmp_path).trainer()


def test_warnings_are_only_about_what_a_user_has_chosen():
  synthetic = find('Synthetic126M')  # ends within its warmup, as in Pax
  assert not [r for r in synthetic().warnings if 'MAX_STEPS' in r]
  assert [r for r in synthetic(MAX_STEPS=90).warnings if 'ends within the warmup' in r]
  mine = type('Mine', (synthetic,), {'MAX_STEPS': 90, '__module__': 'mine'})
  assert [r for r in mine().warnings if 'ends within the warmup' in r]


def test_an_attribute_of_ones_own_has_a_heading_of_its_own():
  class Mine(TinyGPT):
    MY_RATE: float = 0.1

  class WithSubject(TinyGPT, subject='My rates'):
    MY_RATE: float = 0.1

  assert Mine.subject_of('MY_RATE') == 'Attributes of Mine'
  assert WithSubject.subject_of('MY_RATE') == 'My rates'
  assert Mine.subject_of('NUM_LAYERS') == TinyGPT.subject_of('NUM_LAYERS') != 'Attributes of Mine'
  assert Mine.subjects()[0] == 'Attributes of Mine'


def test_a_former_name_of_a_property_is_refused():
  with pytest.raises(UserError, match=r'^Mine\.remarks is now called warnings: rename it$'):

    class Mine(TinyGPT):
      @property
      def remarks(self):
        return ['unheard']


@pytest.mark.parametrize('patterns', [['nothing'], ['.*/lora_[ab]'], ['embedding/.*', 'a/b']])
def test_a_dry_run_refuses_what_trains_nothing_as_a_run_does(patterns):
  with pytest.raises(UserError, match=r'TRAINABLE_VARIABLES: .* matches no whole variable'):
    requirements(TinyGPT(TRAINABLE_VARIABLES=patterns))


@pytest.mark.parametrize('name', ['run', './run', 'runs/a.b'])
def test_the_folder_of_a_run_is_no_experiment(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / name
  folder.mkdir(parents=True)
  (folder / 'experiment.json').write_text('{}')
  with pytest.raises(UserError, match=f'{name} is a folder of a run'):
    find(name)
  with pytest.raises(UserError, match=f'paxlite bisect {name} {name}'):
    diff.main([name, name])
