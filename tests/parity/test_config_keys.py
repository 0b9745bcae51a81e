"""What a config.json means that leaves a key out, or states an unusual value, to transformers."""

import copy
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.cases import BLOCK, YARN
from paxlite.weights.config_keys import read_keys
from paxlite.weights.families import config_json, experiment_of
from paxlite.weights.family_tables import FAMILIES
from tests.support.families import CASES, REFUSED

SMALL = {'llama': BLOCK, 'gemma': BLOCK, 'gpt2': dict(n_embd=32, n_head=4, n_layer=3)} | CASES


def known(case: str) -> dict[str, Any]:
  """Returns transformers' config.json of a case, with the keys that decide what it computes."""
  transformers = pytest.importorskip('transformers')
  kind = case.partition(' ')[0]
  config = transformers.AutoConfig.for_model(kind, **SMALL[case]).to_dict()
  names = {name for key in FAMILIES[kind].keys for name in key.theirs}
  return {k: v for k, v in config.items() if k in names or k == 'model_type'}


def shorter(config: dict[str, Any], path: tuple = ()) -> Iterator[tuple[tuple, dict[str, Any]]]:
  """Yields copies that lack one key or have null for it, at any depth."""
  for name, value in config.items():
    yield (*path, name), {k: v for k, v in config.items() if k != name}
    yield (*path, name), config | {name: None}
    if isinstance(value, dict):
      for found, inner in shorter(value, (*path, name)):
        yield found, config | {name: inner}


def values(config: dict[str, Any]) -> Any:
  """Returns the attributes of a config that decide the model, or None if it is refused."""
  family = FAMILIES[config['model_type']]
  try:
    experiment = family.experiment(**read_keys(family.keys, config))
    experiment.validate()
    # transformers' model computes no prediction modules; whether there are some, the tensors say
    return experiment.replaced(NUM_PREDICTION_MODULES=0).model_values
  except (AttributeError, KeyError, TypeError, UserError):
    return None


@pytest.mark.cases(fast=10, slow=1)
@pytest.mark.parametrize('case', SMALL)
def test_a_missing_key_or_null_means_what_it_means_to_transformers_or_is_refused(case):
  transformers = pytest.importorskip('transformers')
  from huggingface_hub.errors import StrictDataclassError

  whole = known(case)
  kind = whole['model_type']
  made = type(transformers.AutoConfig.for_model(kind))
  compared = 0
  for path, config in shorter(whole):
    ours = values(config) if path != ('model_type',) else None
    if ours is None:
      continue
    try:
      theirs = made.from_dict(config).to_dict()
    except (KeyError, TypeError, StrictDataclassError):  # transformers refuses it
      continue
    expected = values({k: v for k, v in theirs.items() if k in whole})
    if expected is not None:
      assert ours == expected, path
      compared += 1
  assert compared > 3


def sources(rng) -> dict[str, Any]:
  """Returns keys about rotary positions, of which several may say something else."""
  yarn = YARN | dict(factor=float(rng.choice([1.0, 4.0])))
  yarn |= {} if rng.integers(2) else dict(attention_factor=0.7)
  linear = dict(rope_type='linear', factor=2.0)
  plain = dict(rope_type='default', rope_theta=77.0)
  flat = [yarn, linear, plain, {}, None, yarn | dict(rope_theta=33.0)]
  nested = dict(
    full_attention=flat[rng.integers(len(flat))], sliding_attention=dict(plain, rope_theta=55.0)
  )
  parameters = [*flat, nested, dict(full_attention=yarn), dict(sliding_attention=plain)]
  options = dict(
    rope_parameters=parameters, rope_scaling=flat, rope_theta=[11.0], rope_local_base_freq=[22.0],
    partial_rotary_factor=[None, 1.0],
  )  # fmt: skip
  return {k: v[rng.integers(len(v))] for k, v in options.items() if rng.integers(2)}


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('case', ['llama', 'qwen3', 'gemma3_text', 'olmo3', 'gpt_oss', 'phi3'])
def test_two_sources_of_rotary_positions_mean_what_they_mean_to_transformers(case):
  """rope_scaling and rope_parameters, nested or not, and bases and factors beside them."""
  transformers = pytest.importorskip('transformers')
  from huggingface_hub.errors import StrictDataclassError

  whole = known(case)
  names = ('rope_parameters', 'rope_scaling', 'rope_theta', 'rope_local_base_freq')
  whole = {k: v for k, v in whole.items() if k not in names}
  made = type(transformers.AutoConfig.for_model(whole['model_type']))
  compared = 0
  for seed in range(150):
    config = whole | sources(np.random.default_rng(seed))
    ours = values(config)
    if ours is None:
      continue
    try:
      theirs = made.from_dict(copy.deepcopy(config)).to_dict()
    except StrictDataclassError:  # transformers refuses it
      continue
    kept = {k: v for k, v in theirs.items() if k in whole or k in names}
    assert ours == values(kept), config
    compared += 1
  assert compared > 15


@pytest.mark.parametrize('message', REFUSED)
def test_values_that_are_refused(message):
  case, changes = REFUSED[message]
  config = known(case)
  assert values(config) is not None
  with pytest.raises(UserError, match=message):
    experiment_of(config | changes, pathlib.Path('config.json'))


@pytest.mark.parametrize('case', ['mixtral', 'qwen3_moe', 'olmoe', 'deepseek_v2', 'deepseek_v3'])
def test_experts_have_the_activation_of_the_file(case):
  for theirs, ours in {'silu': 'silu', 'gelu': 'gelu_exact'}.items():
    config = known(case) | dict(hidden_act=theirs)
    e = experiment_of(config, pathlib.Path('config.json'))
    assert ours == e.EXPERT_ACTIVATION_CLS
    assert config_json(e, 'float32', None)['hidden_act'] == theirs


def test_an_alpha_of_hunyuan_is_another_base():
  e = experiment_of(known('hunyuan_v1_dense'), pathlib.Path('config.json'))
  assert pytest.approx(1e4 * 1000 ** (10 / 8)) == e.ROPE_THETA
  written = config_json(e, 'float32', None)
  assert written['rope_theta'] == e.ROPE_THETA
  assert 'rope_scaling' not in written


def test_greedy_routing_has_no_groups():
  config = known('deepseek_v2') | dict(n_group=4, topk_group=2, topk_method='greedy')
  e = experiment_of(config, pathlib.Path('config.json'))
  assert (e.NUM_EXPERT_GROUPS, e.NUM_EXPERT_GROUPS_PER_TOKEN) == (1, 1)
