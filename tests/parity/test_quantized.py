"""Weights that are published in FP8, MXFP4 or int4, against what transformers makes of them."""

import copy
import json

import ml_dtypes
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.weights.commands import export_weights
from paxlite.weights.families import family_of
from paxlite.weights.huggingface import read_folder
from tests.support.families import theirs
from tests.support.imported import loaded, run_import, write_trained

torch = pytest.importorskip('torch')
safetensors = pytest.importorskip('safetensors.torch')


def quantized(folder, case: str, changes: dict, config: dict, quantize) -> None:
  """Writes a folder in which `quantize(name, tensor)` replaces tensors by others."""
  theirs(case, **changes).save_pretrained(folder)
  tensors = safetensors.load_file(folder / 'model.safetensors')
  stored = {}
  for name, tensor in tensors.items():
    stored |= quantize(name, tensor)
  safetensors.save_file(stored, folder / 'model.safetensors', metadata={'format': 'pt'})
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'quantization_config': config}))


def as_torch(x: np.ndarray):
  return torch.tensor(np.asarray(x, np.float32))


@pytest.mark.slow
def test_mxfp4(tmp_path):
  """Blocks of 32 values of 4 bits with one power of two, as gpt-oss is published."""
  from transformers.integrations.mxfp4 import convert_moe_packed_tensors

  expected = {}
  generator = torch.Generator().manual_seed(0)

  def quantize(name, tensor):
    if not name.endswith(('experts.gate_up_proj', 'experts.down_proj')):
      return {name: tensor}
    experts, inputs, outputs = tensor.shape
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)
    blocks = draw(0, 256, experts, outputs, inputs // 32, 16).to(torch.uint8)
    scales = draw(110, 130, experts, outputs, inputs // 32).to(torch.uint8)
    expected[name] = convert_moe_packed_tensors(blocks, scales)
    return {f'{name}_blocks': blocks, f'{name}_scales': scales}

  sizes = dict(hidden_size=64, intermediate_size=32)
  quantized(tmp_path / 'hf', 'gpt_oss', sizes, {'quant_method': 'mxfp4'}, quantize)
  _, _, tensors = read_folder(tmp_path / 'hf')
  assert len(expected) == 8
  for name, wanted in expected.items():
    found = tensors.read(name)
    assert found.dtype == ml_dtypes.bfloat16
    assert torch.equal(as_torch(found), wanted.float()), name
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  _, _, params = loaded(tmp_path / 'w')
  gate = params['transformer']['repeat']['x_layers_0']['ff_layer']['w_in_gate'][0]
  first = expected['model.layers.0.mlp.experts.gate_up_proj']
  assert torch.equal(as_torch(gate), first[..., 0::2].float())


def test_fp8_with_scales_of_blocks(tmp_path):
  """As DeepSeek-V3 is published; the last blocks of a tensor are smaller."""
  expected = {}

  def quantize(name, tensor):
    if tensor.ndim != 2 or 'embed' in name or 'lm_head' in name or name.endswith('gate.weight'):
      return {name: tensor}
    rows, columns = (-(-n // 16) for n in tensor.shape)
    scales = torch.rand(rows, columns) + 0.5
    values = tensor.to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    spread = spread[: tensor.shape[0], : tensor.shape[1]]
    expected[name] = (values.float() * spread).to(torch.bfloat16)
    return {name: values, f'{name}_scale_inv': scales}

  config = {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [16, 16]}
  quantized(tmp_path / 'hf', 'deepseek_v3', {}, config, quantize)
  _, _, tensors = read_folder(tmp_path / 'hf')
  assert len(expected) > 50
  for name, wanted in expected.items():
    assert torch.equal(as_torch(tensors.read(name)), wanted.float()), name
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  back = [f'--into={tmp_path / "hf"}', f'--path={tmp_path / "back"}']
  export_weights.main([str(tmp_path / 'w'), *back])
  for path in (tmp_path / 'hf').iterdir():
    assert path.read_bytes() == (tmp_path / 'back' / path.name).read_bytes()


INT4 = {
  'quant_method': 'compressed-tensors', 'format': 'pack-quantized', 'ignore': ['lm_head'],
  'kv_cache_scheme': None, 'quantization_status': 'compressed',
  'config_groups': {
    'group_0': {
      'targets': ['Linear'], 'input_activations': None, 'output_activations': None,
      'weights': {
        'num_bits': 4, 'type': 'int', 'symmetric': True, 'strategy': 'group', 'group_size': 8,
        'dynamic': False, 'observer': 'minmax', 'observer_kwargs': {}, 'actorder': None,
        'block_structure': None,
      },
    },
  },
}  # fmt: skip


def packed_experts(expected: dict):
  """Returns a function that packs the weights of experts, as Kimi K2.5 is published."""
  generator = torch.Generator().manual_seed(0)

  def quantize(name, tensor):
    if '.experts.' not in name:
      return {name: tensor}
    numbers = torch.randint(-8, 8, tensor.shape, generator=generator)
    scales = (torch.rand(len(tensor), tensor.shape[1] // 8, generator=generator) + 0.5).bfloat16()
    expected[name] = (numbers.bfloat16() * scales.repeat_interleave(8, 1)).float()
    words = ((numbers + 8).reshape(len(tensor), -1, 8) << 4 * torch.arange(8)).sum(-1)
    words = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    return {
      f'{name}_packed': words,
      f'{name}_scale': scales,
      f'{name}_shape': torch.tensor(tensor.shape, dtype=torch.int32),
    }

  return quantize


def test_int4_with_scales_of_groups(tmp_path):
  expected = {}
  quantized(tmp_path / 'hf', 'deepseek_v3', {}, INT4, packed_experts(expected))
  _, _, tensors = read_folder(tmp_path / 'hf')
  assert len(expected) == 72
  for name, wanted in expected.items():
    assert torch.equal(as_torch(tensors.read(name)), wanted), name
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_the_text_model_of_kimi_k25(tmp_path, caplog):
  """As it is published: config.json says inside what its text model is, and how it is packed."""
  expected, folder = {}, tmp_path / 'hf'
  quantized(folder, 'deepseek_v3', {}, INT4, packed_experts(expected))
  tensors = safetensors.load_file(folder / 'model.safetensors')
  stored = {f'language_model.{name}': tensor for name, tensor in tensors.items()}
  stored |= {f'{beside}.x.weight': torch.ones(2) for beside in ('vision_tower', 'mm_projector')}
  safetensors.save_file(stored, folder / 'model.safetensors', metadata={'format': 'pt'})
  path = folder / 'config.json'
  text = json.loads(path.read_text()) | {'model_type': 'kimi_k2'}
  path.write_text(
    json.dumps({'model_type': 'kimi_k25', 'text_config': text, 'tie_word_embeddings': False})
  )
  experiment, _, found = read_folder(folder)
  assert family_of(experiment) == 'deepseek_v3'
  assert 'left out: 2 tensors for images' in caplog.text
  for name, wanted in expected.items():
    assert torch.equal(as_torch(found.read(name)), wanted), name
  run_import('hf', folder, tmp_path / 'w')

  export = lambda weights, *flags: export_weights.main([str(weights), *flags])
  export(tmp_path / 'w', f'--path={tmp_path / "same"}')
  files = lambda place: {path.name: path.read_bytes() for path in place.iterdir()}
  assert files(tmp_path / 'same') == files(folder)
  # Norms may be trained, which are not quantized, and experts may not.
  for kind, is_written in (('input_layernorm', True), ('experts.1.down_proj', False)):
    name = next(name for name in found.shapes if kind in name)
    trained, out = tmp_path / f'{kind}.tuned', tmp_path / kind
    write_trained(folder, tmp_path / 'w', trained, {name})
    if not is_written:
      with pytest.raises(UserError, match=f'{name} was trained but is quantized in'):
        export(trained, f'--path={out}')
      assert not out.exists()
      export(trained, f'--path={out}', '--text_only')
      continue
    export(trained, f'--path={out}')
    after = safetensors.load_file(out / 'model.safetensors')
    different = [n for n, tensor in stored.items() if not torch.equal(after[n], tensor)]
    assert different == [f'language_model.{name}']


def test_scales_of_what_is_not_packed_are_tensors_of_their_own(tmp_path):
  """As router.per_expert_scale of Gemma 4, beside experts that are packed."""
  expected = {}
  pack = packed_experts(expected)
  beside = {'model.layers.1.mlp.router.per_expert_scale': torch.ones(4)}
  add = lambda name, tensor: pack(name, tensor) | (beside if name == 'lm_head.weight' else {})
  quantized(tmp_path / 'hf', 'deepseek_v3', {}, INT4, add)
  with pytest.raises(UserError, match=r'per_expert_scale \[4\] is not in the model'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_a_quantization_beside_the_text_model_is_checked(tmp_path):
  quantized(tmp_path / 'hf', 'deepseek_v3', {}, INT4, packed_experts({}))
  path = tmp_path / 'hf/config.json'
  text = json.loads(path.read_text()) | {'model_type': 'kimi_k2'}
  text.pop('quantization_config')
  outer = {'quant_method': 'gptq', 'bits': 4}
  path.write_text(
    json.dumps({'model_type': 'kimi_k25', 'text_config': text, 'quantization_config': outer})
  )
  with pytest.raises(UserError, match=r'quantization_config=.*gptq.* is not supported'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(num_bits=8), 'config_groups: num_bits=8 is not supported'),
    (dict(symmetric=False), 'symmetric=False'),
    (dict(actorder='group'), "actorder='group'"),
    (dict(group_size=-1), 'group_size=-1'),
    (dict(group_size=16), 'has 24 numbers for each output, and .* 3 scales of 16 each'),
    (dict(other=1), 'config_groups: other=1 is not supported'),
  ],
  ids=str,
)
def test_other_groups_of_int4(changes, message, tmp_path):
  config = copy.deepcopy(INT4)
  config['config_groups']['group_0']['weights'] |= changes
  quantized(tmp_path / 'hf', 'deepseek_v3', {}, config, packed_experts({}))
  with pytest.raises(UserError, match=message):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_fp8_with_scales_of_other_blocks(tmp_path):
  def quantize(name, tensor):
    if not name.endswith('q_proj.weight'):
      return {name: tensor}
    return {name: tensor.to(torch.float8_e4m3fn), f'{name}_scale_inv': torch.ones(2, 2)}

  config = {'quant_method': 'fp8', 'weight_block_size': [16, 16]}
  quantized(tmp_path / 'hf', 'qwen3', {}, config, quantize)
  with pytest.raises(UserError, match=r'q_proj.weight_scale_inv is \[2, 2\], and the blocks'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_fp8_with_scales_in_8_bits(tmp_path):
  def quantize(name, tensor):
    if not name.endswith('q_proj.weight'):
      return {name: tensor}
    scales = torch.ones([-(-n // 16) for n in tensor.shape]).to(torch.float8_e8m0fnu)
    return {name: tensor.to(torch.float8_e4m3fn), f'{name}_scale_inv': scales}

  config = {'quant_method': 'fp8', 'scale_fmt': 'ue8m0', 'weight_block_size': [16, 16]}
  quantized(tmp_path / 'hf', 'qwen3', {}, config, quantize)
  with pytest.raises(UserError, match=r'q_proj.weight_scale_inv is F8_E8M0: scales must be'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_fp8_without_scales(tmp_path):
  narrow = lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)}
  quantized(tmp_path / 'hf', 'qwen3', {}, {'quant_method': 'fp8'}, narrow)
  with pytest.raises(UserError, match=r'is F8_E4M3 without scales .* dequantize them first'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')
