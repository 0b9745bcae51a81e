"""The fields of GGUF files of all architectures: written, compared with a proof, and damaged."""

import functools
import pathlib
from typing import Any

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.proof.exported_model import config_of
from paxlite.weights.families import experiment_of
from paxlite.weights.family_tables import FAMILIES
from paxlite.weights.gguf_architecture import ROPE_FREQS
from paxlite.weights.gguf_families import architecture_of as _architecture_of
from paxlite.weights.gguf_families import architectures, model_fields
from paxlite.weights.gguf_reader import GgufTensors, other_config, unread
from paxlite.weights.gguf_writer import _add_fields

gguf = pytest.importorskip('gguf')

architecture_of = functools.cache(_architecture_of)  # it compares whole configs

SIZES = dict(
  NUM_LAYERS=6, MODEL_DIMS=32, HIDDEN_DIMS=24, NUM_HEADS=4, NUM_KV_HEADS=2, VOCAB_SIZE=40,
  DIMS_PER_HEAD=8, MAX_SEQ_LEN=64, MAX_POSITION_EMBEDDINGS=64, LAYERNORM_EPSILON=1e-6,
)  # fmt: skip
EXPERTS = dict(NUM_EXPERTS=4, NUM_EXPERTS_PER_TOKEN=2, EXPERT_HIDDEN_DIMS=16)
DELTA = dict(DELTA_KEY_HEADS=2, DELTA_VALUE_HEADS=4, DELTA_KEY_DIMS=8, DELTA_VALUE_DIMS=8)
SHARED = EXPERTS | dict(SHARED_EXPERT_HIDDEN_DIMS=16, NORMALIZE_EXPERT_WEIGHTS=True)
MORE: dict[str, dict[str, Any]] = {
  'qwen3_5_text': DELTA, 'qwen3_5_moe_text': DELTA | SHARED, 'qwen3_next': DELTA | SHARED,
  'gemma4_text': dict(NUM_DENSE_BLOCKS=6, FULL_DIMS_PER_HEAD=16, SLIDING_WINDOW=16),
  'granitemoehybrid': EXPERTS | dict(MAMBA_HEADS=8, MAMBA_HEAD_DIMS=8, MAMBA_STATE_DIMS=16),
  'mixtral': dict(NUM_EXPERTS=4, NUM_EXPERTS_PER_TOKEN=2),
  'qwen3_moe': EXPERTS | dict(NORMALIZE_EXPERT_WEIGHTS=True),
  'gemma2': dict(QUERY_PRE_ATTN_SCALAR=8, SLIDING_WINDOW=16),
  'gemma3_text': dict(QUERY_PRE_ATTN_SCALAR=8, SLIDING_WINDOW=16),
  'glm4_moe': EXPERTS | dict(NUM_DENSE_BLOCKS=1),
  'gpt_oss': dict(NUM_EXPERTS=4, NUM_EXPERTS_PER_TOKEN=2, SLIDING_WINDOW=16),
}  # fmt: skip
YARN = dict(ROPE_SCALING='yarn', ROPE_FACTOR=4.0, ROPE_ORIGINAL_LENGTH=16, ROPE_BETA_FAST=8.0)
LINEAR = dict(ROPE_SCALING='linear', ROPE_FACTOR=4.0)
LLAMA3 = dict(ROPE_SCALING='llama3', ROPE_FACTOR=8.0, ROPE_ORIGINAL_LENGTH=16)
# a Mistral is a Llama, without its window
KINDS = sorted({a.kind for a in architectures()} - {'mistral'})
CASES = [(kind, {}) for kind in KINDS]
CASES += [
  ('qwen3', YARN), ('qwen2', LINEAR), ('gemma3_text', LINEAR), ('llama', YARN), ('llama', LLAMA3),
  ('llama', LLAMA3 | dict(ROPE_FACTOR=32.0, ROPE_THETA=5e5)),
  ('gemma4_text', dict(PER_LAYER_EMBEDDING_DIMS=8, SOFTMAX_CAP_LOGITS=-1.0)),
  ('gemma4_text', EXPERTS | dict(NUM_DENSE_BLOCKS=0, KEYS_ARE_VALUES=True, FULL_KV_HEADS=1)),
  ('granitemoehybrid', dict(ATTENTION_PATTERN=['full'], NUM_DENSE_BLOCKS=6)),
  ('granitemoehybrid', dict(ATTENTION_PATTERN=['mamba2', 'full'], NUM_DENSE_BLOCKS=6)),
]  # fmt: skip


def experiment(kind: str, **changes):
  e = FAMILIES[kind].experiment(**SIZES, **MORE.get(kind, {}))
  e = e.replaced(**changes)
  e.validate()
  return e


def write(path: pathlib.Path, e, changes: dict[str, Any] | None = None, left_out: str = ''):
  """Writes a file with random tensors, as gguf_writer does; returns its fields."""
  architecture, config = architecture_of(e)
  fields = model_fields(architecture, config) | (changes or {})
  fields = {k: v for k, v in fields.items() if k != left_out}
  writer = gguf.GGUFWriter(str(path), architecture.name)
  _add_fields(writer, fields)
  for entry in architecture.entries(e):
    if not any(entry.theirs in tensors for tensors in writer.tensors):
      writer.add_tensor(entry.theirs, np.ones(entry.shape, np.float32))
  for name, value in architecture.constants(config).items():
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return fields


def compared(path: pathlib.Path, e) -> tuple[dict[str, Any], list[str]]:
  """Returns what a file says otherwise than an experiment, and what an export does not write."""
  architecture, config = architecture_of(e)
  file = GgufTensors(path, architecture)
  return other_config(architecture, config, file), unread(architecture, config, file)


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(('kind', 'changes'), CASES)
def test_an_experiment_comes_back(kind, changes, tmp_path):
  """The config in a proof makes an experiment whose file is that of the first one."""
  e = experiment(kind, **changes)
  fields = write(tmp_path / 'm.gguf', e)
  found = experiment_of(config_of(e), tmp_path)
  assert config_of(found) == config_of(e)
  assert compared(tmp_path / 'm.gguf', found) == ({}, [])
  assert len(fields) >= 10


def test_scales_of_norms_are_stored_with_1_added(tmp_path):
  for kind, expected in (('gemma2', 0.0), ('qwen3', 1.0)):
    write(tmp_path / f'{kind}.gguf', e := experiment(kind))
    tensors = GgufTensors(tmp_path / f'{kind}.gguf', architecture_of(e)[0])
    assert (tensors.read('blk.0.attn_norm.weight') == expected).all()
    assert (tensors.read('blk.0.attn_q.weight') == 1.0).all()


def test_sections_of_rotary_positions_are_those_of_the_published_models():
  """llama.cpp cuts pairs into the three dimensions of an image, which are one number in a text."""
  for width, expected in ((256, [11, 11, 10, 0]), (128, [6, 5, 5, 0]), (8, [1, 0, 0, 0])):
    architecture, config = architecture_of(experiment('qwen3_5_text', DIMS_PER_HEAD=width))
    assert model_fields(architecture, config)['qwen35.rope.dimension_sections'] == expected


WRONG = ('text', 0, 1, 10**9, 3.5, -1.5, float('nan'), float('inf'), True, [1, 2], ['a'], [True])


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['gemma3_text', 'qwen3_moe', 'mixtral', 'phi3'])
def test_another_value_of_a_field_is_found(kind, tmp_path):
  e = experiment(kind, **(LINEAR if kind == 'gemma3_text' else {}))
  path = tmp_path / 'm.gguf'
  fields = write(path, e)
  for name in fields:
    for value in WRONG:
      if value != fields[name]:
        write(path, e, {name: value})
        assert compared(path, e)[0], (name, value)
    write(path, e, left_out=name)
    assert compared(path, e) == ({}, [])
  write(path, e, {f'{architecture_of(e)[0].name}.tomorrow': 1})
  assert compared(path, e) == ({}, [f'{architecture_of(e)[0].name}.tomorrow'])


def test_other_rates_of_rotary_positions_are_found(tmp_path):
  path, e = tmp_path / 'm.gguf', experiment('llama', **LLAMA3)
  write(path, e)
  assert compared(path, e) == ({}, [])
  for other in (e.replaced(ROPE_FACTOR=4.0), experiment('llama')):
    assert compared(path, other)[0] == {'rope_scaling': ROPE_FREQS}


@pytest.mark.parametrize(
  ('kind', 'changes', 'match'),
  [
    ('llama', dict(ACTIVATION_CLS='relu'), "no llama with hidden_act='relu'"),
    ('llama', YARN | dict(ROPE_ATTENTION_FACTOR=1.5), 'no llama with rope_scaling='),
    ('llama', YARN | dict(ROPE_WHOLE_PAIRS=False), 'no llama with rope_scaling='),
    ('qwen3', LLAMA3, 'no qwen3 with rope_scaling='),
    ('gemma3_text', YARN, 'no gemma3_text with rope_scaling='),
    ('gemma3_text', dict(QUERY_PRE_ATTN_SCALAR=7), 'query_pre_attn_scalar=7'),
    ('gemma2', dict(ATTEN_LOGIT_CAP=-1.0), 'attn_logit_softcapping=None'),
    ('gemma2', dict(SEPARATE_EMBEDDING=True), 'tie_word_embeddings=False'),
    ('olmo2', dict(SEPARATE_EMBEDDING=False), 'tie_word_embeddings=True'),
    ('qwen2', dict(DIMS_PER_HEAD=16, HEADS_SPAN_MODEL=False), 'head_dim=16'),
    ('qwen3_moe', dict(NORMALIZE_EXPERT_WEIGHTS=False), 'norm_topk_prob=False'),
    ('mixtral', dict(SLIDING_WINDOW=32), 'sliding_window=32'),
    ('qwen3_5_text', dict(DELTA_VALUE_DIMS=6), 'linear_value_head_dim=6'),
    ('qwen3_5_text', dict(LAYERNORM_EPSILON=1e-5), 'rms_norm_eps=1e-05'),
    ('qwen3_next', dict(NORMALIZE_EXPERT_WEIGHTS=False), 'norm_topk_prob=False'),
    ('gemma4_text', dict(ROPE_FACTOR=8.0, FULL_ROPE_SHARE=1.0), "rope_parameters={'rope_theta"),
    (
      'gemma4_text',
      dict(NUM_LAYERS=12, NUM_DENSE_BLOCKS=12, NUM_KV_SHARED_LAYERS=5),
      'no gemma4_text with num_kv_shared_layers=5',
    ),
    (
      'gemma4_text',
      dict(PER_LAYER_EMBEDDING_DIMS=8, PER_LAYER_EMBEDDING_VOCAB_SIZE=48),
      'vocab_size_per_layer_input=48',
    ),
    ('granitemoehybrid', dict(MAMBA_HEADS=4), 'mamba_expand=1'),
    ('granitemoehybrid', dict(MAMBA_GROUPS=2), 'mamba_n_groups=2'),
    ('granitemoehybrid', dict(USE_CONVOLUTION_BIAS=False), 'mamba_conv_bias=False'),
    ('granitemoehybrid', dict(USE_STATE_BIAS=True), 'mamba_proj_bias=True'),
    ('granitemoehybrid', dict(MAMBA_DT_MIN=0.1), r'time_step_limit=\[0.1, inf\]'),
    ('granitemoehybrid', dict(ATTENTION_PATTERN=['full']), 'num_local_experts=4'),
  ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(kind, changes, match):
  with pytest.raises(UserError, match=match):
    architecture_of(experiment(kind, **changes))


def test_a_window_that_no_text_exceeds_is_none():
  architecture, config = architecture_of(experiment('mixtral', SLIDING_WINDOW=64))
  assert config['sliding_window'] is None
  assert not [f for f in model_fields(architecture, config) if 'window' in f]
