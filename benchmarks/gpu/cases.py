"""The cases of -m benchmarks.gpu: models, their variants, suites of both, and targets.

A case is 'model/variant'. This module imports no package, so that any process can read it.
"""

import dataclasses
from typing import Any

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
  """A model and the work that is measured with it.

  Attributes:
    experiment: Dotted path of its class.
    values: Attributes that differ from the class's.
    tiny: Further attributes for --tiny.
    kind: A key of KINDS.
    fitted: The attribute that is lowered from its value until the model fits into memory.
    environment: Environment variables of its processes.
    reference: The variant or case with whose losses and speed the others are compared.
    architecture: The name of its architecture on torch.
    compile_seconds: An estimate.
  """

  experiment: str
  values: Values
  tiny: Values
  kind: str = 'train'
  fitted: str | None = None
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  reference: str = 'xla'
  architecture: str | None = None
  compile_seconds: float = 15


@dataclasses.dataclass(frozen=True)
class Variant:
  """A way to compute a model.

  Attributes:
    values: Attributes of the experiment.
    kind: A kind that replaces the model's.
    options: Options of a kind without experiments.
    needs: A probe that must succeed.
    capability: The smallest compute capability of the GPU.
    environment: Environment variables of its processes.
    texts: Texts of a packed row; 0: rows are not packed.
    reference: A variant with which this one is compared instead of the model's reference.
    devices: The number of devices, which share the model's batch.
    processes: The number of processes, which have these devices.
  """

  values: Values = dataclasses.field(default_factory=dict)
  kind: str | None = None
  options: Values = dataclasses.field(default_factory=dict)
  needs: str | None = None
  capability: float = 0.0
  environment: dict[str, str] = dataclasses.field(default_factory=dict)
  texts: int = 0
  reference: str | None = None
  devices: int = 1
  processes: int = 1


@dataclasses.dataclass(frozen=True)
class Target:
  """A goal for a measured quantity.

  Attributes:
    work: A description of the work.
    quantity: A key of a case's result.
    bound: The smallest value that meets the target; None: it is reported only.
    cases: The cases; the best one counts.
    at_most: Whether `bound` is the largest value that meets it.
  """

  work: str
  quantity: str
  bound: float | None
  cases: tuple[str, ...]
  at_most: bool = False


# The module that measures each kind of case.
KINDS = {
  'train': 'benchmarks.gpu.train',
  'decode': 'benchmarks.gpu.decode',
  'torch': 'benchmarks.gpu.pytorch',
  'start': 'benchmarks.gpu.start',
}

TINY = dict(MODEL_DIMS=64, NUM_HEADS=4, VOCAB_SIZE=512, MAX_SEQ_LEN=64)
TINY_EXPERTS = TINY | dict(HIDDEN_DIMS=128, DIMS_PER_HEAD=16, PERCORE_BATCH_SIZE=2)


def gpt126m(rows: int) -> Model:
  return Model(
    'paxlite.experiments.gpt.GPT126M',
    dict(PERCORE_BATCH_SIZE=rows, LEARNING_RATE=6e-4),
    TINY | dict(NUM_LAYERS=2, PERCORE_BATCH_SIZE=4),
    architecture='gpt2',
    compile_seconds=20,
  )


def llama7b(rows: int, **values: Any) -> Model:
  return Model(
    'paxlite.experiments.llama.LLaMA7B',
    dict(PERCORE_BATCH_SIZE=rows, LEARNING_RATE=1e-4) | values,
    TINY | dict(NUM_LAYERS=8, HIDDEN_DIMS=176, PERCORE_BATCH_SIZE=2),
    fitted='NUM_LAYERS',
    architecture='llama',
    compile_seconds=20,
  )


def glam126m(cls: str, **fields: Any) -> Model:
  """Returns the whole model, with experts in every second block."""
  # Its attention has a bias, for which cuDNN has no kernel.
  values = dict(PERCORE_BATCH_SIZE=8, LEARNING_RATE=6e-4, ATTENTION_BLOCK_SIZE=512)
  tiny = TINY_EXPERTS | dict(NUM_LAYERS=2, NUM_EXPERTS=8, ATTENTION_BLOCK_SIZE=32)
  return Model(cls, values, tiny, compile_seconds=25, **fields)


def glam64b(cls: str, **fields: Any) -> Model:
  """Returns a model with one block of experts, and a vocabulary that is small beside it."""
  values = dict(
    NUM_LAYERS=1,
    BLOCKS_PER_LAYER=1,
    VOCAB_SIZE=8192,
    PERCORE_BATCH_SIZE=16,
    LEARNING_RATE=1e-4,
    ATTENTION_BLOCK_SIZE=512,
  )
  return Model(cls, values, TINY_EXPERTS | dict(ATTENTION_BLOCK_SIZE=32), **fields)


def llama7b_decode(rows: int) -> Model:
  return Model(
    'paxlite.experiments.llama.LLaMA7B',
    dict(DECODE_BATCH_SIZE=rows),
    TINY | dict(NUM_LAYERS=2, HIDDEN_DIMS=176, MAX_SEQ_LEN=512),
    kind='decode',
    compile_seconds=35,
  )


MODELS = {
  'gpt126m': gpt126m(4),  # Pax's number of rows per device
  'gpt126m_b8': gpt126m(8),
  'gpt126m_b16': gpt126m(16),
  'gpt126m_b32': gpt126m(32),
  # Needs the least memory: recomputes the whole forward pass.
  'llama7b_wide': llama7b(2, NUM_LOSS_CHUNKS=4),
  # Keeps the matrix products. At most 12 layers, because more take time and are no faster.
  'llama7b_dots': llama7b(4, NUM_LAYERS=12, CHECKPOINT_POLICY='SAVE_DOT_WITH_NO_BATCH_DIM'),
  'llama7b_dots_b2': llama7b(2, CHECKPOINT_POLICY='SAVE_DOT_WITH_NO_BATCH_DIM'),
  # The same in a loop over the layers, as with --fdl.UNROLL_LAYERS=[].
  'llama7b_dots_loop': llama7b(
    4, NUM_LAYERS=12, CHECKPOINT_POLICY='SAVE_DOT_WITH_NO_BATCH_DIM', UNROLL_LAYERS=[]
  ),
  # Recomputes nothing.
  'llama7b_all': llama7b(2, CHECKPOINT_POLICY='SAVE_EVERYTHING'),
  'gpt5b_wide': Model(
    'paxlite.experiments.gpt.GPT5B',
    dict(NUM_LAYERS=12),
    TINY | dict(NUM_LAYERS=8, PERCORE_BATCH_SIZE=4),
    fitted='NUM_LAYERS',
    compile_seconds=20,
  ),
  'glam126m': glam126m('paxlite.experiments.glam.GLaM126M64E', reference='glam126m_dense/xla'),
  'glam126m_dense': glam126m('benchmarks.gpu.experiments.DenseGLaM126M'),
  'glam64b_wide': glam64b(
    'paxlite.experiments.glam.GLaM64B64E',
    fitted='NUM_EXPERTS',
    reference='glam64b_wide_dense/xla',
  ),
  'glam64b_wide_dense': glam64b('benchmarks.gpu.experiments.DenseGLaM64B'),
  'llama7b_decode': llama7b_decode(1),
  # The whole model: the moments are on the host, so that it fits on one device.
  'llama7b_start': Model(
    'paxlite.contrib.gpu.scripts_gpu.models.SyntheticLLaMA7B',
    dict(
      PERCORE_BATCH_SIZE=1,
      MAX_SEQ_LEN=1024,
      NUM_LOSS_CHUNKS=4,
      ADAM_MOMENTS_DTYPE='bfloat16',
      GRADIENT_DTYPE='bfloat16',
      OFFLOAD_OPTIMIZER=True,
    ),
    TINY | dict(NUM_LAYERS=2, HIDDEN_DIMS=176),
    kind='start',
    compile_seconds=25,
  ),
  'llama7b_decode_b8': llama7b_decode(8),
  'llama7b_decode_b64': llama7b_decode(64),
  # Compares the device with a CPU: the same arithmetic, all in float32.
  'small': Model(
    'paxlite.experiments.gpt.GPT126M',
    dict(
      NUM_LAYERS=4,
      MODEL_DIMS=256,
      NUM_HEADS=4,
      VOCAB_SIZE=2048,
      MAX_SEQ_LEN=128,
      PERCORE_BATCH_SIZE=4,
      FPROP_DTYPE='float32',
      LEARNING_RATE=6e-4,
    ),
    TINY | dict(NUM_LAYERS=2),
    # Otherwise float32 matrix products are computed in TF32.
    environment={'JAX_DEFAULT_MATMUL_PRECISION': 'highest'},
    reference='cpu',
  ),
}


def te(use: str, recipe: str, capability: float = 0.0) -> Variant:
  values = dict(USE_TE=use, TE_RECIPE=recipe)
  return Variant(values, needs='transformer_engine', capability=capability)


def two(reference: str = 'xla', processes: int = 1, **values: Any) -> Variant:
  return Variant(values, reference=reference, devices=2, processes=processes)


def axis(name: str, shape: list[int]) -> Values:
  """Returns a mesh with an axis beside Pax's three; stages come first."""
  axes = ['replica', 'data', 'mdl']
  axes = [name, *axes] if name == 'stage' else [*axes, name]
  return dict(MESH_AXES=axes, ICI_MESH_SHAPE=shape, DCN_MESH_SHAPE=[1] * 4)


VARIANTS = {
  'cpu': Variant(environment={'JAX_PLATFORMS': 'cpu'}),
  'xla': Variant(),
  'xla_fp8': Variant(dict(USE_FP8=True)),
  'xla_no_flash': Variant(dict(USE_FLASH_ATTENTION=False)),
  'xla_attention_kept': Variant(dict(CHECKPOINT_POLICY='SAVE_DOT_AND_ATTENTION')),
  'xla_packed': Variant(texts=8, reference='xla_packed'),
  'xla_packed_bias': Variant(dict(MAX_SEGMENTS_PER_SEQ=0), texts=8, reference='xla_packed'),
  'xla_packed_bounds': Variant(dict(MAX_SEGMENTS_PER_SEQ=8), texts=8, reference='xla_packed'),
  'xla_dropless': Variant(dict(USE_DROPLESS_MOE=True)),
  # the same steps once more: losses differ where kernels add in a varying order
  'xla_again': Variant(reference='xla'),
  'xla_deterministic': Variant(dict(DETERMINISTIC=True), reference='xla'),
  'xla_deterministic_again': Variant(dict(DETERMINISTIC=True), reference='xla_deterministic'),
  'xla_int8_weights': Variant(dict(INT8_WEIGHTS=True)),
  'te_gemm': te('gemm', 'bf16'),
  'te_layer': te('layer', 'bf16'),
  'te_gemm_delayed': te('gemm', 'DelayedScaling'),
  'te_layer_delayed': te('layer', 'DelayedScaling'),
  'te_gemm_current': te('gemm', 'Float8CurrentScaling'),
  'te_layer_current': te('layer', 'Float8CurrentScaling'),
  'te_gemm_mxfp8': te('gemm', 'MXFP8', 10),
  'te_layer_mxfp8': te('layer', 'MXFP8', 10),
  'te_gemm_nvfp4': te('gemm', 'NVFP4', 10),
  'te_layer_nvfp4': te('layer', 'NVFP4', 10),
  'int8_forward': Variant(dict(USE_INT8='forward'), needs='qwix'),
  'int8_forward_backward': Variant(dict(USE_INT8='forward_backward'), needs='qwix'),
  'two_replica': two(ICI_MESH_SHAPE=[2, 1, 1]),
  'two_data': two(ICI_MESH_SHAPE=[1, 2, 1]),
  'two_mdl': two(ICI_MESH_SHAPE=[1, 1, 2]),
  'two_context': two(**axis('context', [1, 1, 1, 2]), CONTEXT_ATTENTION='ring'),
  'two_stage': two(
    **axis('stage', [2, 1, 1, 1]), USE_REPEATED_LAYER=True, NUM_MICROBATCHES=4, UNROLL_LAYERS=[]
  ),
  'two_expert': two('xla_dropless', **axis('expert', [1, 1, 1, 2]), USE_DROPLESS_MOE=True),
  'two_processes': two(processes=2, DCN_MESH_SHAPE=[1, 2, 1]),
  'torch': Variant(kind='torch', options=dict(compiled=True), needs='transformers'),
  'torch_eager': Variant(kind='torch', options=dict(compiled=False), needs='transformers'),
}

# The most informative cases first, and each reference before the cases compared with it.
SUITES: dict[str, list[str]] = {
  'all': [
    'gpt126m_b16/xla',
    'gpt126m_b16/torch',
    'llama7b_dots/xla',
    'llama7b_dots/torch',
    'llama7b_dots/xla_attention_kept',
    'gpt5b_wide/xla',
    'gpt5b_wide/xla_fp8',
    'llama7b_decode/xla',
    'glam126m_dense/xla',
    'glam126m/xla',
    'llama7b_dots/xla_packed',
    'llama7b_dots/xla_packed_bounds',
    'llama7b_dots/xla_packed_bias',
    'glam126m/xla_dropless',
    'llama7b_start/xla',
    'llama7b_decode_b8/xla',
    'gpt5b_wide/te_layer_delayed',
    'llama7b_dots_loop/xla',
    'gpt126m/xla',
    'gpt126m/xla_no_flash',
    'gpt126m_b32/xla',
  ],
  'train': [
    'gpt126m_b16/xla',
    'llama7b_dots/xla',
    'llama7b_dots_loop/xla',
    'gpt5b_wide/xla',
    'gpt5b_wide/xla_fp8',
    'gpt5b_wide/te_layer_delayed',
    'gpt126m/xla',
    'gpt126m/xla_no_flash',
    'gpt126m_b32/xla',
    'gpt126m_b8/xla',
    'llama7b_dots_b2/xla',
    'llama7b_dots_b2/xla_no_flash',
    'llama7b_all/xla',
    'gpt5b_wide/te_gemm_delayed',
    'gpt5b_wide/te_layer',
  ],
  'experts': [
    'glam126m_dense/xla',
    'glam126m/xla',
    'glam126m/xla_dropless',
    'glam64b_wide_dense/xla',
    'glam64b_wide/xla',
    'glam64b_wide/xla_dropless',
  ],
  'decode': [
    'llama7b_decode/xla',
    'llama7b_decode/xla_int8_weights',
    'llama7b_decode_b8/xla',
    'llama7b_decode_b64/xla',
  ],
  # What the open questions about one GPU need, in about ten minutes.
  'questions': [
    'llama7b_decode_b64/xla',
    'gpt126m_b16/xla',
    'gpt126m_b16/torch',
    'gpt126m_b16/xla_again',
    'gpt126m_b16/xla_deterministic',
    'gpt126m_b16/xla_deterministic_again',
    'glam126m_dense/xla',
    'glam126m/xla_dropless',
  ],
  'start': ['llama7b_start/xla'],
  # Of float32, where a wrong sum of two devices shows, and then of usual sizes.
  'two': [
    'small/cpu',
    'small/xla',
    'small/two_data',
    'small/two_processes',
    'small/two_context',
    'small/two_mdl',
    'small/two_stage',
    'gpt126m_b16/xla',
    'gpt126m_b16/two_data',
    'gpt126m_b16/two_processes',
    'gpt126m_b16/two_context',
    'glam126m_dense/xla',
    'glam126m/xla_dropless',
    'glam126m/two_expert',
    'gpt126m_b16/two_replica',
  ],
  'peers': [
    'gpt126m_b16/xla',
    'gpt126m_b16/torch',
    'llama7b_dots/xla',
    'llama7b_dots/torch',
    'gpt126m/xla',
    'gpt126m/torch',
    'gpt126m_b16/torch_eager',
    'llama7b_wide/xla',
    'llama7b_wide/torch',
  ],
  'backends': [
    'llama7b_wide/xla',
    'llama7b_wide/xla_fp8',
    'llama7b_wide/te_layer_delayed',
    'llama7b_wide/te_gemm_delayed',
    'llama7b_wide/te_layer',
    'llama7b_wide/te_gemm',
    'small/cpu',
    'small/xla',
    'gpt126m/xla',
    'gpt126m/te_layer',
    'gpt126m/te_layer_delayed',
    'gpt126m/xla_fp8',
    'llama7b_wide/int8_forward',
    'llama7b_wide/int8_forward_backward',
    'llama7b_wide/te_layer_current',
    'llama7b_wide/te_gemm_current',
    'llama7b_wide/te_layer_mxfp8',
    'llama7b_wide/te_gemm_mxfp8',
    'gpt126m/te_gemm',
    'gpt126m/te_gemm_delayed',
    'gpt126m/int8_forward',
    'gpt126m/int8_forward_backward',
    'gpt126m/te_layer_current',
    'gpt126m/te_gemm_current',
  ],
}


def find(name: str) -> tuple[Model, Variant]:
  model, _, variant = name.partition('/')
  return MODELS[model], VARIANTS[variant]


_GPT126M = ('gpt126m/xla', 'gpt126m_b8/xla', 'gpt126m_b16/xla', 'gpt126m_b32/xla')
_LLAMA7B = (
  'llama7b_dots/xla',
  'llama7b_dots/xla_attention_kept',
  'llama7b_dots_b2/xla',
  'llama7b_all/xla',
  'llama7b_wide/xla',
)
_FP8 = ('gpt5b_wide/xla_fp8', 'gpt5b_wide/te_layer_delayed', 'gpt5b_wide/te_gemm_delayed')
_DECODE = ('llama7b_decode/xla',)
_DECODE_64 = ('llama7b_decode_b64/xla',)
_AGAIN = ('gpt126m_b16/xla_again',)
_DETERMINISTIC = ('gpt126m_b16/xla_deterministic_again',)
_GPT_TORCH = ('gpt126m_b16/torch', 'gpt126m/torch')
_LLAMA_TORCH = ('llama7b_dots/torch', 'llama7b_wide/torch')
_GLAM126M = ('glam126m/xla', 'glam126m/xla_dropless')
_GLAM64B = ('glam64b_wide/xla', 'glam64b_wide/xla_dropless')
_PACKED = ('llama7b_dots/xla_packed_bounds',)
_NO_FLASH = ('gpt126m/xla_no_flash', 'llama7b_dots_b2/xla_no_flash')
TARGETS = [
  Target('GPT126M, 2048 tokens a row', 'tokens_per_second', 500_000, _GPT126M),
  Target("LLaMA 7B's width, 4096 tokens a row", 'mfu', 0.61, _LLAMA7B),
  Target("GPT5B's width, 2048 tokens a row", 'mfu', 0.60, ('gpt5b_wide/xla',)),
  Target("GPT5B's width, FP8 against bf16", 'ratio', 1.35, _FP8),
  Target("GPT5B's width in FP8, FLOP/s", 'model_flops', 800e12, _FP8),
  Target('GLaM126M64E against its dense stack', 'ratio', 0.80, _GLAM126M),
  Target("GLaM64B64E's width against its dense stack", 'ratio', 0.80, _GLAM64B),
  Target('LLaMA7B, decoding a row, of the memory bandwidth', 'share_of_copy', 0.82, _DECODE),
  Target('LLaMA7B, decoding 64 rows', 'tokens_per_second', 5_800, _DECODE_64),
  Target('GPT126M, losses of two runs', 'largest_difference', None, _AGAIN),
  Target('the same, DETERMINISTIC', 'largest_difference', 0.0, _DETERMINISTIC, at_most=True),
  Target('LLaMA7B, second start', 'second_seconds', 20.0, ('llama7b_start/xla',), at_most=True),
  Target('packed rows, bounds of texts against a bias', 'ratio', None, _PACKED),
  Target("the same, of the data sheet's bandwidth", 'share_of_bandwidth', None, _DECODE),
  Target('GPT126M, against torch', 'inverse_ratio', None, _GPT_TORCH),
  Target("LLaMA 7B's width, against torch", 'inverse_ratio', None, _LLAMA_TORCH),
  Target('flash attention against none', 'inverse_ratio', None, _NO_FLASH),
  *(
    Target(f'{name}, losses against one GPU', 'largest_difference', bound, (name,), at_most=True)
    for name in SUITES['two']
    if find(name)[1].devices == 2
    for bound in [1e-4 if name.startswith('small/') else 1e-2]
  ),
]

# Bytes/s of one device by its data sheet; the first entry that matches whole words counts.
BANDWIDTHS = {
  'H100 PCIe': 2.0e12,
  'H100 NVL': 3.9e12,
  'H100': 3.35e12,
  'H200': 4.8e12,
}


def kind(name: str) -> str:
  model, variant = find(name)
  return variant.kind or model.kind


def reference_name(name: str) -> str:
  """Returns the name of the case that a case is compared with."""
  model = name.partition('/')[0]
  found = VARIANTS[name.partition('/')[2]].reference or MODELS[model].reference
  return found if '/' in found else f'{model}/{found}'
