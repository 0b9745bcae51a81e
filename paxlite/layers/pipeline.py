"""A repeated stack as a pipeline, in which each stage of the mesh holds a part of the layers."""

from typing import Any

import jax
import jax.numpy as jnp

from paxlite.layers.remat import jax_policy
from paxlite.layers.sown import LOSSES, SOWN, is_maximum
from paxlite.layers.transformer import REPEATED, RepeatedTransformer
from paxlite.parallel.partitioning import active_mesh, shard


class PipelinedTransformer(RepeatedTransformer):
  """A RepeatedTransformer whose stages of layers work on different microbatches at the same time.

  It follows GPipe's schedule (https://arxiv.org/abs/1811.06965), as GSPMD implements it
  (https://arxiv.org/abs/2105.04663, section 3.3). There are I + Z − 1 ticks. At each tick every
  stage applies its layers to the activations that it holds, and passes them to the next stage. For
  a share (Z − 1) / (I + Z − 1) of the ticks a stage is idle: its results are not used.

  Parameters are those of RepeatedTransformer [L, …], so that a checkpoint fits any number of
  stages. Shape letters: Z stages, I microbatches of b rows, l layers per stage.

  Attributes:
    num_stages: Z, the size of the mesh axis 'stage'.
    num_microbatches: I. If it does not divide the rows of a batch, the batch is not split.
  """

  num_stages: int = 1
  num_microbatches: int = 1

  def layers(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    # text is generated token by token, for which the pipeline is not used
    if self.is_initializing() or self.is_mutable_collection('cache'):
      return super().layers(x_BTD, positions_BT, segment_ids_BT)
    B, T, D = x_BTD.shape
    Z = self.num_stages
    I = self.num_microbatches if B % self.num_microbatches == 0 else 1
    ticks = I + Z - 1

    # a microbatch takes every I-th row, so that rows stay on their devices
    split = lambda x: x.reshape(B // I, I, *x.shape[1:]).swapaxes(0, 1)
    x_IbTD = shard(split(x_BTD), None, 'batch', 'residual_length', 'act_embed')
    beside = [
      None if a is None else split(jnp.broadcast_to(a, (B, T)))
      for a in (positions_BT, segment_ids_BT)
    ]
    params_Zl = jax.tree.map(
      lambda w: w.reshape(Z, -1, *w.shape[1:]), self.get_variable('params', REPEATED)
    )
    active = active_mesh()
    on_stages = 'stage' if active is not None and 'stage' in active[0].shape else None
    run_stages: Any = jax.vmap(self._stage, spmd_axis_name=on_stages)
    rng = self.make_rng('dropout') if self.has_rng('dropout') else None
    stages = jnp.arange(Z)

    # stages are selected by a mask, because slicing a sharded dimension would gather it
    is_stage = lambda p: (stages == p)[:, None, None, None]

    def tick(held_ZbTD: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
      entering_bTD, t = inputs
      entering_bTD = shard(entering_bTD, 'batch', 'residual_length', 'act_embed')
      held_ZbTD = jnp.where(is_stage(0), entering_bTD, jnp.roll(held_ZbTD, 1, axis=0))
      held_ZbTD = shard(held_ZbTD, 'layers', 'batch', 'residual_length', 'act_embed')
      microbatch_Z = jnp.clip(t - stages, 0, I - 1)
      with_it = [None if a is None else a[microbatch_Z] for a in beside]
      keys_Z = None if rng is None else jax.random.split(jax.random.fold_in(rng, t), Z)
      out_ZbTD, sown = run_stages(params_Zl, held_ZbTD, *with_it, keys_Z)
      out_ZbTD = shard(out_ZbTD, 'layers', 'batch', 'residual_length', 'act_embed')
      left_bTD = jnp.where(is_stage(Z - 1), out_ZbTD, 0).sum(0)
      left_bTD = shard(left_bTD, 'batch', 'residual_length', 'act_embed')
      works_Z = (t >= stages) & (t - stages < I)
      return out_ZbTD, (left_bTD, sown, works_Z)

    # the zeros that enter after the last microbatch do not reach the result
    entering_tbTD = jnp.pad(x_IbTD, [(0, Z - 1), (0, 0), (0, 0), (0, 0)])
    empty_ZbTD = jnp.zeros((Z, *x_IbTD.shape[1:]), x_BTD.dtype)
    _, (left_tbTD, sown, works_tZ) = jax.lax.scan(
      tick, empty_ZbTD, (entering_tbTD, jnp.arange(ticks))
    )
    tokens_I = jnp.ones(I) if beside[1] is None else (beside[1] > 0).sum((1, 2))
    microbatch_tZ = jnp.clip(jnp.arange(ticks)[:, None] - stages, 0, I - 1)
    self._sow(sown, works_tZ, I, jnp.where(works_tZ, tokens_I[microbatch_tZ], 0))
    y_IbTD = shard(left_tbTD[Z - 1 :], None, 'batch', 'residual_length', 'act_embed')
    y_BTD = y_IbTD.swapaxes(0, 1).reshape(B, T, D)
    return shard(y_BTD, 'batch', 'residual_length', 'act_embed')

  def _stage(
    self,
    params_l: Any,
    x_bTD: jax.Array,
    positions_bT: jax.Array,
    segment_ids_bT: jax.Array | None,
    key: jax.Array | None,
  ) -> tuple[jax.Array, Any]:
    """Applies the layers of one stage; returns its output, and the values that they sow [l, …]."""
    block = self.layer_tpl(parent=None)

    def layer(x: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
      params, key = inputs
      rngs = None if key is None else {'dropout': key}
      return block.apply(
        {'params': params}, x, positions_bT, segment_ids_bT, rngs=rngs, mutable=SOWN
      )

    if self.checkpoint_policy != 'SAVE_EVERYTHING':
      layer = jax.checkpoint(layer, policy=jax_policy(self.checkpoint_policy), prevent_cse=False)
    keys_l = None
    if key is not None:
      keys_l = jax.random.split(key, self.num_layers // self.num_stages)
    return jax.lax.scan(layer, x_bTD, (params_l, keys_l))

  def _sow(self, sown: Any, works_tZ: jax.Array, microbatches: int, tokens_tZ: jax.Array) -> None:
    """Sows loss terms and summaries over all microbatches, combined as in task.Task.grads.

    Values of idle stages do not count. Loss terms are averaged over the microbatches. Summaries are
    averaged with the microbatches' tokens as weights, or their maximum is taken.
    """
    for collection, values in sown.items():
      for path, value in jax.tree_util.tree_leaves_with_path(values):
        # [ticks, Z, l]
        along = lambda x_tZ, ndim=value.ndim: x_tZ.reshape(x_tZ.shape + (1,) * (ndim - 2))
        works = along(works_tZ)
        name = '/'.join(k.key for k in path if hasattr(k, 'key'))
        short = name.rpartition('/')[2]
        if collection == LOSSES:
          self.sow(collection, name, jnp.where(works, value, 0).sum(0) / microbatches)
        elif is_maximum(short):
          self.sow(collection, short, jnp.where(works, value, -jnp.inf).max(0))
        else:
          share = along(tokens_tZ / jnp.maximum(tokens_tZ.sum(0), 1e-6))
          self.sow(collection, short, (jnp.where(works, value, 0) * share).sum(0))
