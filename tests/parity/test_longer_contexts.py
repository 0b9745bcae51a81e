"""Positions that attributes stretch, against what transformers makes of an export."""

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxlite.experiments.identity import stated_values
from paxlite.weights.families import config_json
from tests.support.families import theirs
from tests.support.imported import loaded, run_import

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

SHORT, LONG = 32, 128  # tokens of the positions before and after
PLAIN = dict(ROPE_FACTOR=1.0, ROPE_SCALING='llama3')
STRETCHED = dict(ROPE_FACTOR=LONG / SHORT, ROPE_ORIGINAL_LENGTH=SHORT, MAX_SEQ_LEN=LONG)


def longrope(pairs: int) -> dict[str, object]:
  factors = [1 + 3 * i / pairs for i in range(pairs)]
  return STRETCHED | dict(
    ROPE_SCALING='longrope', ROPE_LONG_FACTORS=factors, ROPE_SHORT_FACTORS=factors
  )


OF_PLAIN = {
  'linear': STRETCHED | dict(ROPE_SCALING='linear'),
  'ntk': STRETCHED | dict(ROPE_SCALING='ntk'),
  'yarn': STRETCHED | dict(ROPE_SCALING='yarn', ROPE_BETA_FAST=4.0),
  'yarn with a factor of attention': STRETCHED
  | dict(ROPE_SCALING='yarn', ROPE_ATTENTION_FACTOR=0.9, ROPE_WHOLE_PAIRS=False),
  'llama3': STRETCHED | dict(ROPE_SCALING='llama3'),
  'longrope': longrope(4),
  'another base': dict(ROPE_THETA=5e5, MAX_SEQ_LEN=LONG),
}
# A model of tests/support/families.py, and what is set on top of its scaling.
OTHERS = {
  'yarn becomes ntk': ('llama yarn', OF_PLAIN['ntk'] | dict(ROPE_ATTENTION_FACTOR=0.0)),
  'yarn goes on': ('llama yarn', dict(ROPE_FACTOR=8.0, MAX_SEQ_LEN=LONG)),
  'yarn becomes longrope': ('llama yarn', longrope(5)),
  'linear becomes ntk, but in sliding attention': ('gemma3_text', OF_PLAIN['ntk']),
  'linear becomes yarn, but in sliding attention': ('gemma3_text', OF_PLAIN['yarn']),
  'ntk where attention has a scale of yarn': ('deepseek_v3', OF_PLAIN['ntk']),
  'linear where attention has a scale of yarn': ('deepseek_v3', OF_PLAIN['linear']),
  'longrope becomes ntk': ('phi3 longrope', OF_PLAIN['ntk']),
  'ntk of a part of each head': ('gpt_neox', OF_PLAIN['ntk']),
}
CHANGES = {name: ('qwen2', values) for name, values in OF_PLAIN.items()} | OTHERS


def logits_of(model, ids: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    return model(torch.tensor(ids)).logits.numpy()


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  """Returns a function that makes transformers' model of a case, imported, once."""
  made = {}

  def of(case: str):
    if case not in made:
      folder = tmp_path_factory.mktemp('model')
      model = theirs(case)
      model.save_pretrained(folder / 'hf')
      run_import('hf', folder / 'hf', folder / 'w')
      made[case] = (model, *loaded(folder / 'w'))
    return made[case]

  return of


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('name', CHANGES)
def test_an_export_has_the_same_logits_in_transformers_at_short_and_long_lengths(name, imported):
  case, values = CHANGES[name]
  model, experiment, _, params = imported(case)
  cls = type(experiment)
  changed = cls(**stated_values(cls, experiment.values()) | values)
  changed.validate()
  config = config_json(changed, 'float32', None)
  kind = config.pop('model_type')
  again = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.for_model(kind, **config), attn_implementation='eager'
  ).eval()
  again.load_state_dict(model.state_dict())
  ours = fdl.build(changed.build_task()).model
  for length in (SHORT // 2, LONG):
    ids = np.random.default_rng(length).integers(3, 96, (2, length))
    expected = logits_of(again, ids)
    with jax.default_matmul_precision('highest'):
      logits = jax.jit(ours.apply)({'params': params}, ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
  before = logits_of(model, ids)
  assert np.abs(before - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('case', ['qwen2', 'hunyuan_v1_dense'])
def test_dynamic_scaling_is_ntk_with_the_factor_of_one_length(case, tmp_path):
  """A row of SHORT tokens is not stretched, and one of LONG tokens has the base of that length."""
  factor = 2.0
  rope = dict(rope_type='dynamic', factor=factor, rope_theta=1e4)
  model = theirs(case, rope_parameters=rope, max_position_embeddings=SHORT)
  model.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  experiment, ours, params = loaded(tmp_path / 'w')
  assert experiment.num_positions == SHORT
  stretched = experiment.replaced(
    ROPE_SCALING='ntk', ROPE_FACTOR=factor * LONG / SHORT - (factor - 1), MAX_SEQ_LEN=LONG
  )
  for length, ours_there in ((SHORT, ours), (LONG, fdl.build(stretched.build_task()).model)):
    ids = np.random.default_rng(0).integers(3, 96, (2, length))
    expected = logits_of(model, ids)
    with jax.default_matmul_precision('highest'):
      logits = jax.jit(ours_there.apply)({'params': params}, ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
