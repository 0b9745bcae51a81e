"""What of Gemma 4 and Llama 4 is refused, in one line."""

import pathlib
import re

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.gemma4 import Gemma4_31B, Gemma4E4B
from paxlite.experiments.gemma4.weights import GEMMA4_DEFAULTS, unread_by_gemma4
from paxlite.experiments.llama4.weights import LLAMA4_DEFAULTS
from paxlite.weights.families import config_json, experiment_of

GEMMA4 = GEMMA4_DEFAULTS | dict(hidden_size_per_layer_input=0)


def read(config):
  return experiment_of(config, pathlib.Path('config.json'))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(num_kv_shared_layers=30), 'must leave some of num_hidden_layers=30 that have keys'),
    (
      dict(num_kv_shared_layers=25),
      "NUM_KV_SHARED_LAYERS=25 of NUM_LAYERS=30 leave no earlier block with 'full'",
    ),
    (
      dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=100),
      'PER_LAYER_EMBEDDING_VOCAB_SIZE=100 has no rows for some tokens of VOCAB_SIZE=262144',
    ),
    (dict(use_bidirectional_attention='all'), "use_bidirectional_attention='all' is not"),
    (dict(per_layer_config={'0': {'head_dim': 8}}), 'per_layer_config of layer 0'),
    (dict(per_layer_config={'5': {'sliding_window': 8}}), 'sliding_window of per_layer_config'),
    (dict(attention_bias=True), 'attention_bias=True is not supported'),
  ],
)
def test_options_of_gemma4_that_are_not_computed(change, message):
  assert read(GEMMA4).FULL_DIMS_PER_HEAD == 512
  with pytest.raises(UserError, match=message):
    read(GEMMA4 | change)


def test_what_a_gemma4_file_leaves_out_is_as_in_transformers():
  e = read(GEMMA4_DEFAULTS)
  assert (e.PER_LAYER_EMBEDDING_DIMS, e.PER_LAYER_EMBEDDING_VOCAB_SIZE, e.NUM_KV_SHARED_LAYERS) == (
    256,
    262_144,
    0,
  )
  assert not e.USE_REPEATED_LAYER
  assert read(GEMMA4).USE_REPEATED_LAYER


def test_the_width_inside_layers_that_share_keys():
  doubled = dict(num_kv_shared_layers=18, use_double_wide_mlp=True)
  assert read(GEMMA4 | doubled).KV_SHARED_HIDDEN_DIMS == 2 * 9216
  assert read(GEMMA4 | doubled | dict(use_double_wide_mlp=False)).KV_SHARED_HIDDEN_DIMS == 9216
  assert read(GEMMA4 | doubled | dict(num_kv_shared_layers=0)).KV_SHARED_HIDDEN_DIMS == 9216
  with pytest.raises(UserError, match='no KV_SHARED_HIDDEN_DIMS=5 in this family'):
    config_json(Gemma4E4B(KV_SHARED_HIDDEN_DIMS=5), 'float32', None)


def test_keys_in_published_files_that_no_layer_reads():
  names = [f'model.layers.{i}.self_attn.k_proj.weight' for i in range(42)]
  unread = unread_by_gemma4(Gemma4E4B())
  assert [i for i, name in enumerate(names) if re.fullmatch(unread, name)] == [*range(24, 42)]
  assert not re.fullmatch(unread, 'model.layers.30.self_attn.q_proj.weight')
  assert not any(re.fullmatch(unread_by_gemma4(Gemma4_31B()), name) for name in names)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(moe_layers=[0, 1, 3]), r'moe_layers=\[0, 1, 3\] is not supported'),
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
  with pytest.raises(UserError, match='sliding attention in the last block'):
    config_json(Gemma4_31B(NUM_LAYERS=59, NUM_DENSE_BLOCKS=59), 'float32', None)
  with pytest.raises(UserError, match='NUM_DENSE_BLOCKS=3 of Gemma4_31B must be 0 or'):
    Gemma4_31B(NUM_DENSE_BLOCKS=3).validate()
