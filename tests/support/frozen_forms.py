"""Compares gradients with frozen weights in a scheme with those of the decoded weights in float32.

python -m tests.support.frozen_forms NAME=VALUE … prints the largest relative error of a gradient of
LoRA's factors, and which mesh axes split the arrays of a weight.
"""

import json
import sys

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from paxlite.config.attributes import parse
from paxlite.core.variable_names import REPEATED
from paxlite.experiments.demo import TinyGPT
from paxlite.training.sharded_task import ShardedTask


def sharded(e: TinyGPT) -> ShardedTask:
  e.validate()
  return ShardedTask(fdl.build(e.build_task()), e.mesh(), e.rules, e.SEED)


def decoded(params, task: ShardedTask) -> dict:
  """Returns parameters with all weights in float32."""
  flat, found = flatten_dict(params, sep='/'), {}
  boxes = flatten_dict(task._traced_init.out_info.params, sep='/')
  for name, x in flat.items():
    whole = name.rpartition('/')[0]
    if f'params/{whole}' not in task.quantizations:
      found[name] = x.astype(jnp.float32)
    elif whole not in found:
      weight = boxes[name].weight
      arrays = {k.rpartition('/')[2]: v for k, v in flat.items() if k.rpartition('/')[0] == whole}
      decode = lambda arrays, weight=weight: weight.scheme.decode(arrays, weight.shape)
      found[whole] = (jax.vmap(decode) if f'{REPEATED}/' in name else decode)(arrays)
  return unflatten_dict(found, sep='/')


def compare(**values: object) -> dict[str, object]:
  """Returns the largest error of a gradient, relative to the gradient's norm, and more."""
  e = TinyGPT(USE_LORA=True, LORA_RANK=4, **values)
  ours, plain = sharded(e), sharded(e.replaced(FROZEN_DTYPE='float32'))
  params = ours.new(lambda state: state.params, ours.abstract.params)
  rng = np.random.default_rng(0)
  factor = lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32) * 0.1, x.sharding)
  is_factor = lambda path: 'lora_' in str(path[-1])
  params = jax.tree_util.tree_map_with_path(lambda p, x: factor(x) if is_factor(p) else x, params)
  ids = rng.integers(0, e.VOCAB_SIZE, (e.batch_size, e.MAX_SEQ_LEN + 1), np.int32)
  batch = {
    'ids': ids[:, :-1],
    'labels': ids[:, 1:],
    'weights': np.ones(ids[:, 1:].shape, np.float32),
  }
  batch = jax.device_put(batch, ours.batch_sharding)

  def grads(task: ShardedTask, params):
    with task.compiling():
      found, _, metrics = jax.jit(lambda p, b: task.task.grads(p, b, None))(params, batch)
    return flatten_dict(jax.device_get(found), sep='/'), float(metrics['total_loss'].value)

  with ours.compiling():
    whole = jax.jit(lambda p: decoded(p, ours))(params)
  shardings = jax.tree.map(lambda x: x.sharding, plain.abstract.params)
  (mine, loss), (theirs, theirs_loss) = (
    grads(ours, params),
    grads(plain, jax.device_put(whole, shardings)),
  )
  found = {k: v for k, v in mine.items() if v is not None}
  assert [k for k in found if 'lora_' in k] == list(found) != []
  errors = [np.abs(v - theirs[k]).max() / np.abs(theirs[k]).max() for k, v in found.items()]
  specs = {k: str(x.sharding.spec) for k, x in flatten_dict(params, sep='/').items()
           if f'params/{k.rpartition("/")[0]}' in ours.quantizations}  # fmt: skip
  return {'error': float(max(errors)), 'losses': [loss, theirs_loss], 'arrays': specs}


if __name__ == '__main__':
  stated = dict(word.split('=', 1) for word in sys.argv[1:])
  print(json.dumps(compare(**{k: parse(TinyGPT, k, v) for k, v in stated.items()})))
