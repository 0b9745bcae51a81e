"""What of Gemma 4 and Llama 4 is refused, in one line."""

import pathlib

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.gemma4 import Gemma4_31B
from paxlite.weights.families import config_json, experiment_of
from paxlite.weights.gemma4_table import GEMMA4_DEFAULTS
from paxlite.weights.llama4_table import LLAMA4_DEFAULTS

GEMMA4 = GEMMA4_DEFAULTS | dict(hidden_size_per_layer_input=0)


def read(config):
  return experiment_of(config, pathlib.Path('config.json'))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(hidden_size_per_layer_input=256), 'hidden_size_per_layer_input=256 is not implemented'),
    (dict(num_kv_shared_layers=18), 'num_kv_shared_layers=18 is not implemented'),
    (dict(use_bidirectional_attention='all'), "use_bidirectional_attention='all' is not"),
    (dict(per_layer_config={'0': {'head_dim': 8}}), 'per_layer_config of layer 0'),
    (dict(per_layer_config={'5': {'sliding_window': 8}}), 'sliding_window of per_layer_config'),
    (dict(attention_bias=True), 'attention_bias=True is not implemented'),
  ],
)
def test_options_of_gemma4_that_are_not_computed(change, message):
  assert read(GEMMA4).FULL_DIMS_PER_HEAD == 512
  with pytest.raises(UserError, match=message):
    read(GEMMA4 | change)


def test_a_gemma4_file_without_the_key_has_embeddings_for_each_layer():
  with pytest.raises(UserError, match='hidden_size_per_layer_input=256 is not implemented'):
    read(GEMMA4_DEFAULTS)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(moe_layers=[0, 1, 3]), r'moe_layers=\[0, 1, 3\] is not implemented'),
    (dict(layer_types=['chunked_attention'] * 48), 'with rotary positions'),
    (dict(no_rope_layers=[1, 0]), 'no_rope_layers must have 48 numbers'),
    (dict(attention_chunk_size=None), 'attention_chunk_size is missing'),
  ],
)
def test_options_of_llama4_that_are_not_computed(change, message):
  assert read(LLAMA4_DEFAULTS).CHUNK_LENGTH == 8192
  with pytest.raises(UserError, match=message):
    read(LLAMA4_DEFAULTS | change)


def test_experiments_that_gemma4_has_no_file_for():
  with pytest.raises(UserError, match='last block has sliding attention'):
    config_json(Gemma4_31B(NUM_LAYERS=59, NUM_DENSE_BLOCKS=59), 'float32', None)
  with pytest.raises(UserError, match='NUM_DENSE_BLOCKS=3 of Gemma4_31B must be 0 or'):
    Gemma4_31B(NUM_DENSE_BLOCKS=3).validate()
