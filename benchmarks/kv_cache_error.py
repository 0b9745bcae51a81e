"""python -m benchmarks.kv_cache_error CHECKPOINT TEXT_FILE [--tokens=512]

Prints how far keys and values of 8 bits move the logits of a model, in float32, on the first tokens
of a text: as a share of their root mean square, and, without the shift that all logits of a token
share, of their standard deviation; how often the likeliest token is the same; and the loss.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.generation.inference import load_checkpoint
from paxlite.layers.attention import cache_encoding


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n', 1)[1])
  parser.add_argument('checkpoint')
  parser.add_argument('text', type=pathlib.Path)
  parser.add_argument('--tokens', type=int, default=512)
  args = parser.parse_args()

  found = load_checkpoint(args.checkpoint, overrides={'FPROP_DTYPE': 'float32'})
  ids = np.array([found.encode(args.text.read_text('utf-8'))[: args.tokens]])

  def logits(dtype: str | None) -> np.ndarray:
    with cache_encoding.activate(dtype):
      apply = jax.jit(
        lambda params, ids: found.model.apply({'params': params}, ids, mutable=['cache'])[0]
      )
      return np.asarray(apply(found.params, ids)[0], np.float64)

  def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))

  def centered(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)

  plain = logits(None)
  for dtype in (None, *cache_encoding.DTYPES):
    x = logits(dtype)
    if dtype is not None and np.array_equal(x, plain):
      raise SystemExit('the cache of this model has no keys and values of heads to encode')
    log_probs = jax.nn.log_softmax(jnp.asarray(x[:-1]))
    print(json.dumps({
      'dtype': dtype, 'tokens': ids.size, 'of_root_mean_square': rms(x - plain) / rms(plain),
      'of_standard_deviation': rms(centered(x - plain)) / rms(centered(plain)),
      'same_likeliest': float((x.argmax(-1) == plain.argmax(-1)).mean()),
      'loss': -float(jnp.take_along_axis(log_probs, ids[0, 1:, None], -1).mean()),
    }))  # fmt: skip


if __name__ == '__main__':
  main()
