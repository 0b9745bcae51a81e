"""Linear attention of rows that are split over devices, which pass on their states.

What a device's tokens do to a state is an affine map, S ↦ A·S + b. Each device computes that of its
own tokens, gathers those of all others, and so knows the state before its first token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxlite.experiments.hybrid.chunked_scan import ScanChunks, advance, chunks_of, joined
from paxlite.parallel import partitioning


def is_split() -> bool:
  """Returns whether the active mesh splits the tokens of rows over devices, without a pipeline."""
  active = partitioning.active_mesh()
  if active is None or active[0].shape.get('stage', 1) > 1:
    return False
  mesh, rules = active
  return partitioning.num_shards(mesh.shape, rules, 'length') > 1


def linear_attention_over_context(
  q_BTNK: jax.Array,
  k_BTNK: jax.Array,
  v_BTNV: jax.Array,
  log_decay_BTN: jax.Array,
  beta_BTN: jax.Array | None,
  segment_ids_BT: jax.Array | None,
) -> jax.Array:
  """Returns what each token reads, [B, T, N, V]; the arguments are those of linear_attention."""
  active = partitioning.active_mesh()
  assert active is not None
  mesh, rules = active
  (axis,) = partitioning.axes_of(rules['length'])
  arrays = q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, beta_BTN, segment_ids_BT
  specs = tuple(None if x is None else _spec(x, mesh, rules) for x in arrays)
  local = functools.partial(_local, axis, mesh.shape[axis])
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[2], check_vma=False)(
    *arrays
  )


def _spec(x: jax.Array, mesh: Mesh, rules: partitioning.Rules) -> jax.sharding.PartitionSpec:
  names = ('batch', 'length', 'act_heads', None)[: x.ndim]
  return partitioning.spec_of(x, names, mesh, rules)


def _local(
  axis: str,
  size: int,
  q_BTNK: jax.Array,
  k_BTNK: jax.Array,
  v_BTNV: jax.Array,
  log_decay_BTN: jax.Array,
  beta_BTN: jax.Array | None,
  ids_BT: jax.Array | None,
) -> jax.Array:
  """What the tokens of one device read."""
  index = jax.lax.axis_index(axis)
  previous_B = None
  if ids_BT is not None:
    before_B = jax.lax.ppermute(ids_BT[:, -1], axis, [(i, i + 1) for i in range(size - 1)])
    previous_B = jnp.where(index == 0, ids_BT[:, 0], before_B)
  chunks = chunks_of(q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, beta_BTN, ids_BT, previous_B)
  a_RBNKK, b_RBNKV = jax.lax.all_gather(_effect(chunks), axis)
  state_BNKV = jnp.zeros_like(b_RBNKV[0])
  for r in range(size - 1):
    moved_BNKV = jnp.matmul(a_RBNKK[r], state_BNKV, precision=jax.lax.Precision.HIGHEST)
    state_BNKV = jnp.where(r < index, moved_BNKV + b_RBNKV[r], state_BNKV)
  _, o_MBNCV = jax.lax.scan(advance, state_BNKV, chunks)
  return joined(o_MBNCV, v_BTNV)


def _effect(chunks: ScanChunks) -> tuple[jax.Array, jax.Array]:
  """Returns what all chunks do to a state, A [B, N, K, K] and b [B, N, K, V]."""
  _, B, N, _, K = chunks.write.shape
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def step(
    effect: tuple[jax.Array, jax.Array], chunk: ScanChunks
  ) -> tuple[tuple[jax.Array, jax.Array], None]:
    both = jnp.concatenate(effect, -1)
    values = chunk.values
    written = jnp.concatenate([jnp.zeros((*values.shape[:-1], K)), values], -1)
    if chunk.erase is not None:
      written -= product('BNCK,BNKV->BNCV', chunk.erase, both.astype(chunk.erase.dtype))
    both *= chunk.keep
    both += product('BNCK,BNCV->BNKV', chunk.write, written.astype(chunk.write.dtype))
    return (both[..., :K], both[..., K:]), None

  start = jnp.broadcast_to(jnp.eye(K), (B, N, K, K))
  nothing = jnp.zeros((B, N, K, chunks.values.shape[-1]))
  return jax.lax.scan(step, (start, nothing), chunks)[0]
