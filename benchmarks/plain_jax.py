"""A peer without libraries: GPT's train step in plain JAX, with one parameter per layer.

The math is that of paxlite's GPT (pre-norm blocks, learned positions, tied embedding, tanh GELU,
AdamW with global-norm clipping), written by hand as a user would. So the difference in time is the
cost of paxlite's structure. Shape letters: B batch, T length, D model, N heads, H head dim,
F hidden, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp


def init(key, *, layers, model, heads, hidden, vocab, length):
  keys = iter(jax.random.split(key, 4 * layers + 2))
  normal = lambda *shape: 0.023 * jax.random.normal(next(keys), shape)
  norm = lambda: {'scale': jnp.zeros(model), 'bias': jnp.zeros(model)}
  block = lambda: {
    'ln1': norm(),
    'qkv': normal(model, 3, heads, model // heads),
    'qkv_b': jnp.zeros((3, heads, model // heads)),
    'out': normal(heads, model // heads, model),
    'out_b': jnp.zeros(model),
    'ln2': norm(),
    'up': normal(model, hidden),
    'up_b': jnp.zeros(hidden),
    'down': normal(hidden, model),
    'down_b': jnp.zeros(model),
  }
  return {
    'emb': normal(vocab, model),
    'pos': normal(length, model),
    'blocks': [block() for _ in range(layers)],
    'ln': norm(),
  }


def layer_norm(p, x):
  mean = x.mean(-1, keepdims=True)
  var = jnp.square(x - mean).mean(-1, keepdims=True)
  return (x - mean) * jax.lax.rsqrt(var + 1e-5) * (1 + p['scale']) + p['bias']


def block(p, x_BTD):
  T, H = x_BTD.shape[1], p['qkv'].shape[-1]
  h = layer_norm(p['ln1'], x_BTD)
  qkv = jnp.einsum('BTD,DKNH->KBTNH', h, p['qkv']) + p['qkv_b'][:, None, None]
  q, k, v = qkv[0] * H**-0.5, qkv[1], qkv[2]
  scores = jnp.einsum('BTNH,BSNH->BNTS', q, k)
  scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
  context = jnp.einsum('BNTS,BSNH->BTNH', jax.nn.softmax(scores), v)
  x_BTD += jnp.einsum('BTNH,NHD->BTD', context, p['out']) + p['out_b']
  h = jax.nn.gelu(layer_norm(p['ln2'], x_BTD) @ p['up'] + p['up_b'])
  return x_BTD + h @ p['down'] + p['down_b']


def loss_fn(params, ids, labels):
  x = params['emb'][ids] + params['pos'][: ids.shape[1]]
  for p in params['blocks']:
    x = block(p, x)
  logits_BTV = layer_norm(params['ln'], x) @ params['emb'].T
  log_z = jax.nn.logsumexp(logits_BTV, axis=-1)
  return jnp.mean(log_z - jnp.take_along_axis(logits_BTV, labels[..., None], -1)[..., 0])


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, ids, labels, lr=6e-4, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, clip=1.0):
  params, m, v, step = state
  loss, grads = jax.value_and_grad(loss_fn)(params, ids, labels)
  norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
  grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / norm), grads)
  m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
  v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)
  c1, c2 = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)
  update = lambda w, m, v: w - lr * (m / c1 / (jnp.sqrt(v / c2) + eps) + decay * w)
  return (jax.tree.map(update, params, m, v), m, v, step + 1), loss


def init_state(key, **size):
  params = init(key, **size)
  zeros = lambda: jax.tree.map(jnp.zeros_like, params)
  return params, zeros(), zeros(), jnp.zeros((), jnp.int32)
