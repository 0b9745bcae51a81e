"""python -m tests.support.drawn_meshes [--seed=N] [--first=N] [--draws=N]: meshes and models.

Draws a model (heads, norms, activations, caps, windows, rotary positions, experts and their router,
tied embeddings, remat, packed rows, microbatches) and a mesh of 8 devices, with pipelines, copies
over DCN and rows that are split over context. Trains three steps on the mesh and on one device with
the same values, and prints one JSON line per draw: the largest relative difference of the loss,
that of any parameter, as a share of how far it moved, and that of the biases of routers; or what
refused the draw. No activation is relu: where a unit is nearly 0, rounding decides its derivative.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
from typing import Any

AXES = ('stage', 'replica', 'data', 'mdl', 'expert', 'context')
ROWS = 16


def draw(seed: str) -> tuple[bool, dict[str, Any], dict[str, Any]]:
  """Returns whether the model has experts, its attributes, and those of its mesh."""
  rng = random.Random(seed)
  pick, chance = lambda *options: rng.choice(options), lambda share=0.5: rng.random() < share
  sizes = dict.fromkeys(AXES, 1)
  for _ in range(3):  # 8 devices are three factors of 2
    sizes[pick(*AXES)] *= 2
  repeats = pick(1, 2) if 1 < sizes['stage'] < 8 else 1
  heads = pick(4, 8)
  model = dict(
    NUM_LAYERS=max(2, sizes['stage'] * repeats), NUM_HEADS=heads, DIMS_PER_HEAD=8, MODEL_DIMS=32,
    HEADS_SPAN_MODEL=False, NUM_KV_HEADS=pick(*(n for n in (1, 2, 4, 8) if n <= heads)),
    HIDDEN_DIMS=64, VOCAB_SIZE=64, MAX_SEQ_LEN=32, FPROP_DTYPE='float32',
    NORM_CLS=pick('LayerNorm', 'RmsNorm'), NORM_POLICY=pick('pre', 'post', 'primer_hybrid'),
    ACTIVATION_CLS=pick('gelu', 'gelu_exact', 'silu'), USE_GATED_ACTIVATION=chance(),
    USE_BIAS=chance(), QK_NORM=pick('none', 'per_head', 'all_heads'),
    ATTEN_LOGIT_CAP=pick(0.0, 5.0), SOFTMAX_CAP_LOGITS=pick(0.0, 5.0), SLIDING_WINDOW=pick(0, 6),
    USE_ATTENTION_SINKS=chance(0.3), USE_ROTARY_POSITION_EMB=chance(), SEPARATE_EMBEDDING=chance(),
    CHECKPOINT_POLICY=pick('SAVE_NOTHING', 'SAVE_EVERYTHING', 'SAVE_DOT_AND_ATTENTION'),
    NUM_LOSS_CHUNKS=pick(1, 4), NUM_MICROBATCHES=pick(1, 2, 4), UNROLL_LAYERS=[],
    USE_REPEATED_LAYER=sizes['stage'] > 1 or chance(),
    # an update that rounding cannot turn around, as it does where a gradient is nearly 0
    ADAM_EPSILON=1.0, LEARNING_RATE=0.1, LR_SCHEDULE='constant', CLIP_GRADIENT_NORM_TO_VALUE=0.5,
  )  # fmt: skip
  if model['USE_ROTARY_POSITION_EMB']:
    model |= dict(ROPE_LAYOUT=pick('interleaved', 'half'), ROPE_FRACTION=pick(1.0, 0.5))
    model |= pick({}, dict(ROPE_FACTOR=4.0, ROPE_SCALING=pick('linear', 'yarn', 'llama3')))
  has_experts = sizes['expert'] > 1 or chance()
  if has_experts:
    groups = pick(1, 2, 4)
    model |= dict(
      BLOCKS_PER_LAYER=1, NUM_EXPERTS=8, NUM_EXPERTS_PER_TOKEN=pick(1, 2), NUM_MOE_GROUPS=1,
      USE_DROPLESS_MOE=chance(0.7), EXPERT_CAPACITY_FACTOR=pick(1.0, 8.0),
      USE_GATED_EXPERTS=chance(), EXPERT_ACTIVATION_CLS=pick('gelu', 'silu'),
      NUM_SHARED_EXPERTS=pick(0, 1), AUX_LOSS_COEF=pick(0.0, 0.1),
      ROUTER=pick('top_k', 'group_top_k', 'balanced', 'balanced'), ROUTER_BIAS_RATE=0.1,
    )  # fmt: skip
    if model['ROUTER'] != 'top_k':
      model |= dict(NUM_EXPERT_GROUPS=groups, NUM_EXPERT_GROUPS_PER_TOKEN=pick(1, groups))
    if sizes['data'] > 1 and sizes['expert'] == 1 and not model['USE_DROPLESS_MOE']:
      model['EXPERT_AXIS'] = pick(None, 'data')
  axes = [a for a in AXES if sizes[a] > 1 or a in ('replica', 'data', 'mdl')]
  over_hosts = [1] * len(axes)
  for i, axis in enumerate(axes):
    if axis in ('replica', 'data') and sizes[axis] > 1 and chance(0.3):
      sizes[axis], over_hosts[i] = sizes[axis] // 2, 2
      break
  mesh = dict(MESH_AXES=axes, ICI_MESH_SHAPE=[sizes[a] for a in axes], DCN_MESH_SHAPE=over_hosts)
  mesh |= dict(NUM_PIPELINE_REPEATS=repeats, SEQUENCE_SHARDED_ACTIVATIONS=chance(0.2))
  if sizes['context'] > 1:
    mesh['CONTEXT_ATTENTION'] = pick('auto', 'gather', 'ring')
  return has_experts, model, mesh


def experiment(has_experts: bool, values: dict[str, Any], mesh: dict[str, Any]) -> Any:
  from paxlite.experiments.llama import LLaMA
  from paxlite.experiments.parts.experts import MixtureOfExperts

  devices = math.prod([*mesh['ICI_MESH_SHAPE'], *mesh['DCN_MESH_SHAPE']])
  cls = MixtureOfExperts if has_experts else LLaMA
  if has_experts:
    mesh = {'EXPERT_AXIS': None, **mesh} if devices == 1 else mesh
  e = cls(**values | mesh | dict(PERCORE_BATCH_SIZE=ROWS / devices))
  e.validate()
  return e


def trained(e: Any, state: Any, packed: bool) -> tuple[list[float], Any, Any]:
  """Returns the losses of three steps, the parameters after them, and the router's biases."""
  import fiddle as fdl
  import jax

  from paxlite.parallel import partitioning
  from paxlite.training.step import train_step
  from tests.support.meshes import batch_of, compiled

  task = fdl.build(e.build_task())
  batch = batch_of(e)
  if not packed:
    batch = {name: batch[name] for name in ('ids', 'labels', 'weights')}
  active: Any = contextlib.nullcontext
  if e.num_devices > 1:
    mesh = e.mesh()
    shapes = partitioning.sharded_shapes(
      jax.eval_shape(task.init, jax.random.key(0)), mesh, e.rules
    )
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, shapes)
    batch = jax.device_put(batch, partitioning.batch_sharding(mesh, e.rules))
    active = functools.partial(partitioning.activate, mesh, e.rules)

  def three(state: Any, batch: Any) -> Any:
    with active():
      return jax.lax.scan(lambda s, _: train_step(task, 0, s, batch), state, None, length=3)

  state, metrics = jax.device_get(compiled(jax.jit(three), state, batch)(state, batch))
  losses = metrics['Metrics/total_loss'].value.tolist()
  learned, others = task.optimizer.split(state.params)
  return losses, learned, task.optimizer.split_ruled(others)[0]


def check(seed: str) -> dict[str, Any]:
  import fiddle as fdl
  import jax
  import numpy as np
  from flax.linen import meta

  from paxlite.core.errors import UserError
  from tests.support.meshes import compiled, largest

  has_experts, model, mesh = draw(seed)
  found = {'seed': seed, 'mesh': mesh, 'model': model}
  names = ['replica', 'data', 'mdl']
  alone = dict(MESH_AXES=names, ICI_MESH_SHAPE=[1] * 3, DCN_MESH_SHAPE=[1] * 3)
  packed = random.Random(f'rows {seed}').random() < 0.7
  try:
    e, one = experiment(has_experts, model, mesh), experiment(has_experts, model, alone)
  except UserError as refused:
    return found | {'refused': str(refused)}
  task = fdl.build(one.build_task())
  start = jax.jit(lambda rng: meta.unbox(task.init(rng)))
  state = jax.device_get(compiled(start, jax.random.key(0))(jax.random.key(0)))
  losses, learned, biases = trained(e, state, packed)
  losses_1, learned_1, biases_1 = trained(one, state, packed)
  before, _ = task.optimizer.split(state.params)
  value, path = largest(_differences(learned, learned_1, before))
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), biases, biases_1)
  return found | {
    'loss': max(abs(a - b) / abs(b) for a, b in zip(losses, losses_1, strict=True)),
    'parameter': value, 'at': path, 'bias': max(jax.tree.leaves(moved), default=0.0),
  }  # fmt: skip


def _differences(learned: Any, expected: Any, before: Any) -> Any:
  """Returns by how much each parameter differs, as a share of how far three steps moved it.

  A gradient that is 0 but for rounding, as that of a bias of keys, counts as one that is a
  thousandth of the largest. A parameter has 7 digits, of which two are enough beside its update.
  """
  import jax
  import numpy as np

  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), expected, before)
  least = 1e-3 * max(jax.tree.leaves(moved))
  return jax.tree.map(
    lambda a, b, far: float(np.abs(a - b).max() / (far + least + 1e-2 * np.abs(b).max())), learned,
    expected, moved,
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--first', type=int, default=0)
  parser.add_argument('--draws', type=int, default=8)
  args = parser.parse_args()
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count=8 {flags}'
  for number in range(args.first, args.first + args.draws):
    print(json.dumps(check(f'{args.seed} {number}')), flush=True)


if __name__ == '__main__':
  main()
