"""Transformer Engine's Python code without CUDA; import tests.support.te_cpu before it.

transformer_engine.jax computes everything in plain JAX if its custom calls are off. It still
imports a compiled extension, for the names of enumerations. These names are here; all other uses of
the extension fail. This tests how paxlite uses Transformer Engine, with its FP8 states and numbers,
but not its kernels.

The package is expected in the folder te of the environment, where `make test` installs it. An
ordinary installation without its libraries would stop programs that only check whether it exists.
"""

import enum
import os
import pathlib
import sys
import types

_ENUMS = {
  'DType': {
    'kByte': 0, 'kInt32': 2, 'kInt64': 3, 'kFloat32': 4, 'kFloat16': 5, 'kBFloat16': 6,
    'kFloat8E4M3': 7, 'kFloat8E5M2': 8, 'kFloat8E8M0': 9, 'kFloat4E2M1': 10,
  },
  'JAXX_Collective_Op': {'NONE': 0, 'ALL_GATHER': 1, 'REDUCE_SCATTER': 2},
  'JAXX_Quantize_Layout': {'ROWWISE': 0, 'COLWISE': 1, 'ROWWISE_COLWISE': 2},
  'JAXX_Routing_Map_Format': {'BYTEMAP': 0, 'BITMAP_U8': 1},
  'JAXX_Scaling_Mode': {
    'NO_SCALING': 0, 'DELAYED_TENSOR_SCALING': 1, 'MXFP8_1D_SCALING': 2,
    'CURRENT_TENSOR_SCALING': 3, 'NVFP4_1D_SCALING': 4, 'NVFP4_2D_SCALING': 5,
  },
  'JAXX_Score_Function': {'SIGMOID': 0, 'SOFTMAX': 1, 'SQRTSOFTPLUS': 2},
  'NVTE_Activation_Type': {
    name: i
    for i, name in enumerate(
      (
        'GELU', 'GEGLU', 'GLU', 'SILU', 'SWIGLU', 'RELU', 'REGLU', 'QGELU', 'QGEGLU', 'SRELU',
        'SREGLU', 'CLAMPED_SWIGLU',
      )
    )
  },
  'NVTE_Bias_Type': {'NVTE_NO_BIAS': 0, 'NVTE_PRE_SCALE_BIAS': 1, 'NVTE_POST_SCALE_BIAS': 2},
  'NVTE_Fused_Attn_Backend': {'NVTE_No_Backend': -1, 'NVTE_F16_arbitrary_seqlen': 1, 'NVTE_FP8': 2},
  'NVTE_Mask_Type': {
    'NVTE_NO_MASK': 0, 'NVTE_PADDING_MASK': 1, 'NVTE_CAUSAL_MASK': 2, 'NVTE_PADDING_CAUSAL_MASK': 3,
    'NVTE_CAUSAL_BOTTOM_RIGHT_MASK': 4, 'NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK': 5,
  },
  'NVTE_Norm_Type': {'LayerNorm': 0, 'RMSNorm': 1},
  'NVTE_QKV_Format': {'NVTE_SBHD': 0, 'NVTE_BSHD': 1, 'NVTE_THD': 2, 'NVTE_QKV_Format_NOT_SET': 8},
  'NVTE_QKV_Layout': {
    'NVTE_BS3HD': 5, 'NVTE_BSHD_BS2HD': 7, 'NVTE_BSHD_BSHD_BSHD': 9, 'NVTE_T3HD': 10,
    'NVTE_THD_T2HD': 12, 'NVTE_THD_THD_THD': 14, 'NVTE_QKV_Layout_NOT_SET': 26,
  },
  'NVTE_Softmax_Type': {
    'NVTE_VANILLA_SOFTMAX': 0,
    'NVTE_OFF_BY_ONE_SOFTMAX': 1,
    'NVTE_LEARNABLE_SOFTMAX': 2,
  },
}  # fmt: skip

# Versions of a machine with an H100 and CUDA 13, but without a kernel for attention.
_ANSWERS = {
  'registrations': {}, 'get_cudnn_version': 92800, 'get_cublasLt_version': 131000,
  'get_cuda_version': 13000, 'get_cudnn_frontend_version': 13200,
  'get_device_compute_capability': 90, 'get_num_compute_streams': 4, 'get_cgemm_num_max_streams': 1,
  'get_grouped_gemm_setup_workspace_size': 1024,
}  # fmt: skip


def _extension() -> types.ModuleType:
  module = types.ModuleType('transformer_engine_jax')
  for name, members in _ENUMS.items():
    setattr(module, name, enum.IntEnum(name, members))
  for name, answer in _ANSWERS.items():
    setattr(module, name, lambda *_, _answer=answer, **__: _answer)
  no_backend = module.NVTE_Fused_Attn_Backend.NVTE_No_Backend  # type: ignore[attr-defined]
  module.get_fused_attn_backend = lambda *_, **__: (no_backend, 'no GPU')  # type: ignore[attr-defined]

  def missing(name: str):
    if name.startswith(('__', 'get_ep_instance')):
      raise AttributeError(name)

    def fail(*_, **__):
      raise RuntimeError(f'transformer_engine_jax.{name} was called without CUDA')

    return fail

  module.__getattr__ = missing  # type: ignore[method-assign]
  return module


def _install() -> None:
  sys.path.append(str(pathlib.Path(sys.prefix) / 'te'))
  os.environ['NVTE_JAX_CUSTOM_CALLS'] = 'false'
  os.environ['NVTE_FUSED_ATTN'] = '0'
  sys.modules['transformer_engine_jax'] = _extension()
  # During its own build, Transformer Engine does not look for its libraries.
  os.environ['NVTE_PROJECT_BUILDING'] = '1'
  import transformer_engine.common

  del os.environ['NVTE_PROJECT_BUILDING']
  transformer_engine.common.load_framework_extension = lambda framework: None


_install()
