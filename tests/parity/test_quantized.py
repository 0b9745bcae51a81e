"""Weights that are published in FP8 or MXFP4, against what transformers makes of them."""

import json

import ml_dtypes
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.weights.huggingface import read_folder
from tests.support.families import theirs
from tests.support.imported import loaded, run_import

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


def test_fp8_with_scales_of_other_blocks(tmp_path):
  def quantize(name, tensor):
    if not name.endswith('q_proj.weight'):
      return {name: tensor}
    return {name: tensor.to(torch.float8_e4m3fn), f'{name}_scale_inv': torch.ones(2, 2)}

  config = {'quant_method': 'fp8', 'weight_block_size': [16, 16]}
  quantized(tmp_path / 'hf', 'qwen3', {}, config, quantize)
  with pytest.raises(UserError, match=r'q_proj.weight_scale_inv is \[2, 2\], and the blocks'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')


def test_fp8_without_scales(tmp_path):
  narrow = lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn)}
  quantized(tmp_path / 'hf', 'qwen3', {}, {'quant_method': 'fp8'}, narrow)
  with pytest.raises(UserError, match=r'is F8_E4M3 without scales .* dequantize them first'):
    run_import('hf', tmp_path / 'hf', tmp_path / 'w')
