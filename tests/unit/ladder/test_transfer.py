"""The rules make what one step changes independent of the width, which is what they are for."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.demo import DemoGPT, TinyGPT
from paxlite.experiments.gemma import Gemma3_4B
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.gpt import GPT126M
from paxlite.ladder import sizes, transfer
from paxlite.ladder.sizes import Size
from paxlite.optim import variable_groups
from paxlite.training.step import train_step
from tests.support.meshes import batch_of

BASE = Size(64, 2)
RATES = {'adam': 3e-3, 'adamw': 3e-3, 'lion': 1e-3, 'muon': 1e-2, 'normuon': 1e-2, 'soap': 3e-3}


def tiny(**values):
  return TinyGPT(
    **dict(
      MODEL_DIMS=BASE.width, NUM_LAYERS=BASE.layers, LR_SCHEDULE='constant', WEIGHT_DECAY=0.0,
      SOFTMAX_CAP_LOGITS=0.0, ATTEN_LOGIT_CAP=0.0, CLIP_GRADIENT_NORM_TO_VALUE=0.0,
      USE_ROTARY_POSITION_EMB=True,
    )
    | values
  )  # fmt: skip


def change_of_logits(e, steps=4) -> float:
  """Returns the root mean square of what some steps change in the logits of their batch."""
  e.validate()
  task = fdl.build(e.build_task())
  batch = {name: jnp.asarray(x) for name, x in batch_of(e).items()}
  state = jax.jit(lambda key: meta.unbox(task.init(key)))(jax.random.key(0))
  read = batch['ids'], batch['segment_pos'], batch['segment_ids']
  logits = jax.jit(lambda params: task.model.apply({'params': params}, *read))
  step = jax.jit(lambda state: train_step(task, 0, state, batch)[0])
  before = logits(state.params)
  for _ in range(steps):
    state = step(state)
  return float(jnp.sqrt(jnp.mean((logits(state.params) - before) ** 2)))


def growth(e, with_rules: bool, width=256) -> float:
  """Returns how much more the steps change in a wide model."""
  size = Size(width, BASE.layers)
  of = transfer.values_of(e, size, BASE) if with_rules else sizes.values_of(e, size)
  return change_of_logits(e.replaced(**of)) / change_of_logits(e)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
  ('optimizer', 'values'),
  [
    ('adamw', dict(SEPARATE_EMBEDDING=True, USE_GATED_ACTIVATION=True, SCALE_EMBEDDING=True)),
    ('muon', {}),
    ('muon', dict(MUON_UPDATE_RMS=0.0, LEARNING_RATE=0.02)),
    ('adam', {}),
    *((name, {}) for name in ('adamw', 'lion', 'normuon', 'soap')),
  ],
)
def test_steps_change_as_much_in_a_wide_model(optimizer, values):
  e = tiny(**{'OPTIMIZER': optimizer, 'LEARNING_RATE': RATES[optimizer], **values})
  assert 0.5 < growth(e, with_rules=True) < 1.5
  if 'MUON_UPDATE_RMS' not in values:
    assert growth(e, with_rules=False) > 1.6


def test_at_the_base_nothing_changes():
  e = DemoGPT(NUM_HEADS=16)
  values = transfer.values_of(e, Size.of(e), Size.of(e))
  assert values.items() <= e.values().items()


def test_the_values_of_another_size():
  e = DemoGPT(NUM_HEADS=16, WEIGHT_DECAY_FACTORS=['.*/ffn_layer1/w=3'])
  values = transfer.values_of(e, Size(64, 1), Size(256, 4))
  by_hand = dict(
    INIT_STD=0.046, OUTPUT_INIT_STD=0.0, SOFTMAX_INIT_STD=0.023, LOGITS_DIVISOR=0.25,
    ADAM_EPSILON=4e-8, RESIDUAL_FACTOR=4.0, LEARNING_RATE_FACTORS=['transformer/x_layers_0/.*/w=2'],
    WEIGHT_DECAY_FACTORS=[
      r'transformer/x_layers_\d+/ff_layer/ffn_layer1/w=1.5',
      r'transformer/x_layers_\d+/ff_layer/ffn_layer2/w=0.5',
      r'transformer/x_layers_\d+/self_attention/post/w=0.5',
      r'transformer/x_layers_\d+/self_attention/qkv/combined/w=0.5',
    ],
  )  # fmt: skip
  assert {name: values[name] for name in by_hand} == by_hand
  e.replaced(**values).validate()


def test_patterns_match_the_variables_whose_inputs_grow_and_no_others():
  e = GPT126M(USE_ROTARY_POSITION_EMB=True, USE_BIAS=True)
  size = Size(1536, 12)
  (pattern,) = transfer.values_of(e, size, Size.of(e))['LEARNING_RATE_FACTORS']
  assert pattern == 'transformer/.*/w=0.5'
  weights = [name for name in transfer.variables(e) if name.endswith('/w')]
  assert len(weights) == 12 * 4


@pytest.mark.parametrize(
  ('experiment', 'said'),
  [
    (DemoGPT(OPTIMIZER='sgd'), 'OPTIMIZER=sgd: its learning rate at other widths is unknown'),
    (DemoGPT(USE_LORA=True), 'a ladder predicts training from the beginning'),
    (DemoGPT(WEIGHT_INIT='xavier_uniform', OUTPUT_INIT_STD=0.023), 'set WEIGHT_INIT=normal and'),
    (GPT126M(), 'GPT126M learns position embeddings, which'),
  ],
)
def test_what_has_no_rules_is_refused(experiment, said):
  with pytest.raises(UserError, match=said):
    transfer.check(experiment)


def test_a_depth_that_no_attribute_follows_is_refused():
  e = Gemma3_4B()
  transfer.check_depths(e, [Size(1280, 34), Size.of(e)])
  with pytest.raises(UserError, match='that are as deep as the model, such as 640x34'):
    transfer.check_depths(e, [Size(1280, 4), Size.of(e)])


def test_the_size_that_the_values_are_for():
  e = DemoGPT(NUM_HEADS=16)
  assert transfer.base_of(e, [Size(64, 2), Size(256, 4)]) == Size(256, 1)
  assert transfer.base_of(e, [Size(64, 4), Size(256, 4)]) == Size(256, 4)
  stated = e.replaced(RESIDUAL_FACTOR=0.22)
  assert transfer.base_of(stated, [Size(64, 2), Size(256, 4)]) == Size(256, 4)
  glam = GLaM126M64E()
  assert transfer.base_of(glam, [Size(384, 4), Size.of(glam)]) == Size(768, 2)


@pytest.mark.parametrize('repeated', [False, True])
def test_deeper_models_add_as_much_to_the_activations(repeated):
  """By RESIDUAL_FACTOR, all blocks together; the other values do not depend on the depth."""
  e = tiny(USE_REPEATED_LAYER=repeated)
  found = transfer.values_of(e, Size(64, 8), Size(64, 2))
  assert found.pop('RESIDUAL_FACTOR') == 0.25
  assert found == sizes.values_of(e, Size(64, 8))


def test_experts_and_groups_of_heads_have_the_rates_of_their_inputs():
  e = GLaM126M64E()
  size = Size(2 * e.MODEL_DIMS, e.NUM_LAYERS)
  factors = variable_groups.parsed(
    transfer.values_of(e, size, Size.of(e))['LEARNING_RATE_FACTORS'], 'LEARNING_RATE_FACTORS'
  )
  at_size = transfer.variables(e.replaced(**sizes.values_of(e, size)))
  found = {name: variable_groups.factor_of(factors, name) for name in at_size}
  halved = {name for name, factor in found.items() if factor == 0.5}
  assert {name for name, factor in found.items() if factor not in (0.5, 1)} == set()
  assert halved == {name for name, (_, d) in at_size.items() if d.inputs and not d.is_table}
  assert any(name.endswith('/w_in') for name in halved)
