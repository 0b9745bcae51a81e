"""Checkpoint policies, which choose the activations of a layer to keep for its backward pass.

The policies in _NAMES keep the activations that layers mark with `checkpoint_name`, and recompute
all others. The names of the policies are those of praxis' AutodiffCheckpointType, and three that
keep what fused kernels of attention compute.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import jax
from flax import linen as nn

from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import call_name
from paxlite.layers.attention.partial_attention import RESULTS as ATTENTION_RESULTS
from paxlite.layers.precision.einsum import FP8_LARGEST
from paxlite.parallel.partitioning import HOST

if TYPE_CHECKING:
  from jax.extend.core import Primitive

_Body = TypeVar('_Body', bound=Callable)

LORA_SUM = 'lora_sum'  # the sum of the products of a weight and of LoRA's factors

CheckpointPolicy = Literal[
  'SAVE_NOTHING',
  'SAVE_EVERYTHING',
  'SAVE_DOT_ONLY',
  'SAVE_DOT_WITH_NO_BATCH_DIM',
  'SAVE_QKV_OUT_PROJ',
  'SAVE_QKV_OUT_PROJ_SEPARATE',
  'SAVE_OUT_PROJ',
  'SAVE_CONTEXT',
  'SAVE_CONTEXT_AND_OUT_PROJ',
  'SAVE_QKV_CONTEXT_OUT_PROJ',
  'SAVE_DOT_FOR_MLPERF_200B',
  'SAVE_ITERATION_INPUT',
  'SAVE_TRANSFORMER_LAYER_OUTPUT',
  'SAVE_ATTENTION',
  'SAVE_QKV_ATTENTION_OUT_PROJ',
  'SAVE_DOT_AND_ATTENTION',
]

# AUTO is decided when training starts; elsewhere it is SAVE_NOTHING.
PolicyChoice = Literal['AUTO', CheckpointPolicy]

_QKV = ('combined_qkv_proj', 'query_proj', 'key_proj', 'value_proj')
_NAMES: dict[str, tuple[str, ...]] = {
  'SAVE_QKV_OUT_PROJ': ('combined_qkv_proj', 'out_proj'),
  'SAVE_QKV_OUT_PROJ_SEPARATE': ('query_proj', 'key_proj', 'value_proj', 'out_proj'),
  'SAVE_OUT_PROJ': ('out_proj',),
  'SAVE_CONTEXT': ('context',),
  'SAVE_CONTEXT_AND_OUT_PROJ': ('context', 'out_proj'),
  'SAVE_QKV_CONTEXT_OUT_PROJ': (*_QKV, 'context', 'out_proj'),
  'SAVE_ITERATION_INPUT': ('iteration_input',),
  'SAVE_TRANSFORMER_LAYER_OUTPUT': ('transformer_layer_out',),
}


_OF_PRODUCTS = (
  'SAVE_DOT_ONLY', 'SAVE_DOT_WITH_NO_BATCH_DIM', 'SAVE_DOT_AND_ATTENTION',
  'SAVE_QKV_CONTEXT_OUT_PROJ', 'SAVE_DOT_FOR_MLPERF_200B', 'SAVE_QKV_ATTENTION_OUT_PROJ',
)  # fmt: skip

# What SAVE_DOT_ONLY, SAVE_DOT_WITH_NO_BATCH_DIM and SAVE_…ATTENTION… keep beside products.
# The first four are as large as the product that each is computed from. Where the backward pass
# reads one of them instead of the product, JAX does not keep the product, and computes less again.
_BESIDE_PRODUCTS = (
  LORA_SUM,
  'attention_input',  # queries, keys and values after their biases and rotations
  'residual',  # the sum after attention
  'norm_statistics',  # one or two numbers for each token
)
# What each is computed from. It is not kept if OFFLOAD_ACTIVATIONS moves that to the host.
_COMPUTED_FROM = {'attention_input': _QKV, 'residual': ('out_proj',)}

# The names that layers give to their activations.
ActivationName = Literal[
  'iteration_input',
  'combined_qkv_proj',
  'query_proj',
  'key_proj',
  'value_proj',
  'context',
  'out_proj',
  'transformer_layer_out',
]

_NAMES['SAVE_DOT_FOR_MLPERF_200B'] = _NAMES['SAVE_QKV_CONTEXT_OUT_PROJ']  # both are names in Pax


@dataclasses.dataclass(frozen=True)
class Offloaded:
  """A policy that also moves some activations to the memory of the host, until they are needed."""

  policy: str  # the name of a CheckpointPolicy, for all other activations
  names: Sequence[str]  # the ActivationNames of those that are moved


def jax_policy(policy: str | Offloaded) -> Callable[..., bool]:
  """Returns the jax checkpoint policy for the name of a CheckpointPolicy.

  It also keeps the largest absolute values that FP8 products find, a few numbers for each. Raises
  ValueError if the name is unknown.
  """
  rest = _policy_of_activations(policy)

  def decide(primitive: 'Primitive', *avals: object, **params: object) -> bool:
    is_largest = primitive.name == 'name' and params['name'] == FP8_LARGEST
    return is_largest or rest(primitive, *avals, **params)

  return decide


def _policy_of_activations(policy: str | Offloaded) -> Callable[..., bool]:
  policies = jax.checkpoint_policies
  if isinstance(policy, Offloaded):
    return _offloading(policy)
  both = policies.save_from_both_policies
  beside = policies.save_only_these_names(*_BESIDE_PRODUCTS)
  no_batch = both(beside, policies.dots_with_no_batch_dims_saveable)
  of_attention = both(beside, policies.save_only_these_names(*_QKV, 'out_proj'))
  plain = {
    'SAVE_NOTHING': policies.nothing_saveable, 'SAVE_EVERYTHING': policies.everything_saveable,
    'SAVE_DOT_ONLY': both(beside, policies.dots_saveable), 'SAVE_DOT_WITH_NO_BATCH_DIM': no_batch,
    'SAVE_ATTENTION': attention_saveable,
    'SAVE_QKV_ATTENTION_OUT_PROJ': both(of_attention, attention_saveable),
    'SAVE_DOT_AND_ATTENTION': both(no_batch, attention_saveable),
  }  # fmt: skip
  if policy in plain:
    return plain[policy]
  if policy not in _NAMES:
    raise ValueError(f'unknown checkpoint policy {policy!r}; known: {get_args(CheckpointPolicy)}')
  return policies.save_only_these_names(*_NAMES[policy])


def _offloading(policy: Offloaded) -> Callable[..., bool]:
  names = policy.names
  offload = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=list(names), offload_src='device',
    offload_dst=HOST,
  )  # fmt: skip
  rest = _policy_of_activations(policy.policy)
  computed = {name for name, source in _COMPUTED_FROM.items() if not set(source).isdisjoint(names)}

  def decide(primitive: 'Primitive', *avals: object, **params: object) -> bool:
    name = params['name'] if primitive.name == 'name' else None
    if name in computed:
      return False
    return (offload if name in names else rest)(primitive, *avals, **params)

  return decide


def attention_saveable(primitive: 'Primitive', *_: object, **params: object) -> bool:
  """Keeps the results of fused kernels of attention: the context and the sums of the softmax.

  The backward kernels read both. Where the context alone is kept, the forward kernel runs again.
  Attention in plain XLA has no such results, and nothing of it is kept. Of a ring, the results of
  all its steps together are kept. Of splash's kernel, the results that have a name are kept instead
  of its own, which have each sum 128 times.
  """
  if primitive.name == 'name':
    return params.get('name') == ATTENTION_RESULTS
  return attention_kernels.is_residual(call_name(primitive.name, params))


def keeps_products(policy: str) -> bool:
  """Returns whether a policy keeps most products of a layer, and not everything."""
  return policy in _OF_PRODUCTS


def remat(body: _Body, policy: str | Offloaded, in_scan: bool) -> _Body:
  """Returns `body(module, …)` with a backward pass that recomputes what `policy` does not keep."""
  if policy == 'SAVE_EVERYTHING':
    return body  # a jax.checkpoint that keeps everything would only add barriers
  # in a scan the loop prevents XLA from undoing the recomputation; elsewhere a barrier is needed
  return nn.remat(body, policy=jax_policy(policy), prevent_cse=not in_scan)


def recomputed(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """Returns `function` with a backward pass that keeps only its arguments and recomputes the rest.

  This is for cheap functions of many operations: repeated layers would otherwise keep the result
  of each operation. In unrolled layers XLA reuses the results, and computes nothing twice.
  """
  return jax.checkpoint(function, prevent_cse=False)
