"""QK-clip, which with Muon makes MuonClip (https://arxiv.org/abs/2507.20534, algorithm 1).

After an update, the weights of queries and keys shrink in each head whose largest logit of the step
was above a threshold, so that this logit would have been the threshold.
"""

import dataclasses
import functools
from collections.abc import Mapping

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.attribute_kinds import OffAtZero, Training
from paxlite.config.templates import Template, template, template_field
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax, masked_scores
from paxlite.layers.sown import SUMMARIES
from paxlite.losses.metrics import Metrics, Weighted
from paxlite.losses.outputs import Outputs
from paxlite.training.task import Task

LARGEST = 'max_attention_logit'  # the name of the summary, and the start of those of heads
_MODULE = 'qk_clip'
_NORMS = 'qk_norm_tpl', 'rotated_norm_tpl', 'query_norm_tpl'  # templates of attention
_BLOCK = 512  # the most queries whose scores exist at a time


class LargestLogits(nn.Module):
  """Attention that also sows the largest logit of each head, [N] float32."""

  kernel_tpl: Template = template_field(AttentionKernel)  # computes the attention

  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visible: AttentionMask,
    bias_JNTS: jax.Array | None,
    softmax: Softmax,
  ) -> jax.Array:
    if self.is_mutable_collection(SUMMARIES) and visible.is_from_first:
      q, k = jax.lax.stop_gradient((q_BTNH, k_BSKH))
      self.sow(SUMMARIES, LARGEST, largest_logits(q, k, visible, softmax.query_scale))
    context: jax.Array = self.kernel_tpl()(q_BTNH, k_BSKH, v_BSKH, visible, bias_JNTS, softmax)
    return context


def largest_logits(
  q_BTNH: jax.Array, k_BSKH: jax.Array, visible: AttentionMask, scale: float
) -> jax.Array:
  """Returns the largest scale · q·k of each head among the keys that its queries see, [N]."""
  T, S = q_BTNH.shape[1], k_BSKH.shape[1]
  size = max(n for n in range(1, min(_BLOCK, T) + 1) if T % n == 0)

  def of_block(i: jax.Array) -> jax.Array:
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
    segments = visible.segments and (part(visible.segments[0]), visible.segments[1])
    mask = AttentionMask(i * size, visible.window, segments).mask(size, S)
    scores_BNTS = masked_scores(part(q_BTNH), k_BSKH, mask, None, Softmax(scale))
    return scores_BNTS.max((0, 2, 3))

  return jax.lax.map(of_block, jnp.arange(T // size)).max(0)


@dataclasses.dataclass(frozen=True)
class QkClipTask(Task):
  """A task that clips the weights of queries and keys after each update."""

  threshold: float = 100.0  # the largest logit that a head may have
  plain_dims: int = 0  # width of the part of a head of latent attention that is not rotated

  def observed(self, outputs: Outputs) -> Metrics:
    found = jax.tree_util.tree_leaves_with_path(outputs.sown[SUMMARIES])
    heads = {path_name(path): x for path, x in found if f'{_MODULE}/{LARGEST}' in path_name(path)}
    return {f'{LARGEST}/{name}': Weighted(x, jnp.ones(())) for name, x in heads.items()}

  def after_update(self, params: PyTree, metrics: Metrics, valid: jax.Array) -> PyTree:
    gammas = {}
    for name, largest in metrics.items():
      if name.startswith(f'{LARGEST}/'):
        ratio = self.threshold / jnp.maximum(largest.value, self.threshold)
        attention = name.removeprefix(f'{LARGEST}/').partition(f'/dot_product/{_MODULE}/')[0]
        gammas[attention] = jnp.where(valid, ratio, 1.0)
    return clipped(params, gammas, self.plain_dims)


def clipped(params: PyTree, gammas: Mapping[str, jax.Array], plain_dims: int = 0) -> PyTree:
  """Returns parameters whose logits are multiplied by a factor for each head.

  Queries and keys each get its root. Keys that several heads share, as in grouped queries and in
  the rotated part of latent attention, stay as they are, and their queries get the whole factor.

  Args:
    params: The parameters.
    gammas: The factors [N] by the names of attention layers; of a repeated layer, [layers, N].
    plain_dims: See QkClipTask.
  """
  shapes = {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(params)}

  def one(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
    name = path_name(path)
    for attention, gamma in gammas.items():
      if name.startswith(f'{attention}/'):
        key = shapes.get(f'{attention}/qkv/key/w')
        is_shared = key is not None and key[-2] < gamma.shape[-1]
        layer = name.removeprefix(f'{attention}/').rpartition('/')[0]
        factors = _factors(layer, gamma, x.shape[-1], is_shared, plain_dims)
        return x if factors is None else x * _like(factors, x.ndim)
    return x

  return jax.tree_util.tree_map_with_path(one, params)


def _factors(
  layer: str, gamma: jax.Array, width: int, is_shared: bool, plain_dims: int
) -> jax.Array | None:
  """Returns the factors [layers, …, N, 1 or H] of a projection; None: it stays as it is."""
  root, one = jnp.sqrt(gamma), jnp.ones_like(gamma)
  parts = functools.partial(_in_parts, plain=plain_dims, width=width)
  return {
    'qkv/combined': lambda: jnp.stack([root, root, one], -2)[..., None],
    'qkv/query': lambda: (gamma if is_shared else root)[..., None],
    'qkv/key': lambda: None if is_shared else root[..., None],
    'query': lambda: parts(root, gamma),
    'key_value': lambda: parts(root, one),
  }.get(layer, lambda: None)()


def _in_parts(first: jax.Array, second: jax.Array, plain: int, width: int) -> jax.Array:
  """Returns [..., N, width], whose first `plain` numbers are the first factor."""
  return jnp.where(jnp.arange(width) < plain, first[..., None], second[..., None])


def _like(factors: jax.Array, ndim: int) -> jax.Array:
  """Returns factors of a weight [layers, (3), D, N, H] or of a bias [layers, (3), N, H]."""
  lead = factors.ndim - 2
  shape = *factors.shape[:lead], *(1,) * (ndim - factors.ndim), *factors.shape[lead:]
  return factors.reshape(shape)


class QkClip(LanguageModel, subject='Optimization'):
  """A LanguageModel whose weights of queries and keys may be clipped after each update."""

  QK_CLIP: Training[OffAtZero] = (
    0.0  # largest attention logit of a head before its weights shrink, 100 in Kimi K2; 0: none
  )

  def validate(self) -> None:
    if self.QK_CLIP and self.USE_TE == 'layer':  # the checks of that do not name QK_CLIP
      raise UserError(f"QK_CLIP={self.QK_CLIP:g} needs paxlite's own attention, not USE_TE=layer")
    super().validate()
    if not self.QK_CLIP:
      return
    blocks = [self.block_of(kind) for kind in self.block_kinds]
    attention = [block.attention_tpl for block in blocks]
    has = lambda *names: any(getattr(a, name, None) for a in attention for name in names)
    reasons = {
      'QK_NORM=none: norms of queries and keys undo it': has(*_NORMS),
      'attention to all keys, without an indexer': has('selection_tpl'),
      'whole weights that are all trained, without USE_LORA and TRAINABLE_VARIABLES': (
        self.USE_LORA or list(self.TRAINABLE_VARIABLES) != ['.*']
      ),
      'a mesh without the axes stage and context': bool(
        {'stage', 'context'} & {k for k, n in self.mesh_sizes.items() if n > 1}
      ),
    }
    if needs := [what for what, is_missing in reasons.items() if is_missing]:
      raise UserError(f'QK_CLIP={self.QK_CLIP:g} needs {needs[0]}')

  def dot_product_attention(self) -> fdl.Partial:
    found = super().dot_product_attention()
    if self.QK_CLIP:
      found.kernel_tpl = template(LargestLogits, kernel_tpl=found.kernel_tpl, name=_MODULE)
    return found

  def task(self) -> fdl.Config:
    found = super().task()
    if self.QK_CLIP:
      if fdl.get_callable(found) is not Task:
        raise UserError('QK_CLIP makes a task of its own: derive yours from qk_clip.QkClipTask')
      fdl.update_callable(found, QkClipTask)
      found.threshold = self.QK_CLIP
      found.plain_dims = getattr(self.attention(), 'plain_dims', 0)
    return found
