"""Updates of a repeated stack are those of the unrolled model, for every optimizer."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from paxlite.experiments.demo import TinyGPT
from paxlite.optim import by_name
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.per_layer import per_layer
from paxlite.optim.transformations import scale_by_pax_adam
from paxlite.parallel.weight_dims import Weight, declared, muon_dims, weight_dims

AXES = {
  'qkv': (('qkv', 'embed', 'heads', 'head_dim'), 'BTD,ADNH->ABTNH'),
  'up': (('embed', 'mlp'), 'BTD,DF->BTF'),
  'scale': (('norm',), ''),
}


def by_size(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


def of_qkv(params):
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == 'qkv', params)


OWN = {
  'lamb': lambda: optax.lamb(0.01),
  'lars': lambda: optax.lars(0.1, momentum=0.9),
  'factored': lambda: optax.adafactor(0.01, min_dim_size_to_factor=3, momentum=0.9),
  'sm3': lambda: optax.sm3(0.1),
  'muon': lambda: contrib.muon(0.01, muon_weight_dimension_numbers=muon_dims),
  'mask of dimensions': lambda: optax.adamw(0.01, weight_decay=0.5, mask=by_size),
  'clip by block': lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1, 0.9)),
  "Pax's Adam": lambda: optax.chain(scale_by_pax_adam(update_clip=0.5), optax.scale(-0.1)),
  'global norm': lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(0.01)),
  'global norm and a mask': lambda: optax.chain(
    optax.clip_by_global_norm(0.1), optax.adamw(0.01, weight_decay=0.5, mask=by_size)
  ),
  'global norm of some': lambda: optax.chain(
    optax.masked(optax.clip_by_global_norm(0.1), of_qkv), optax.sgd(0.1)
  ),
  'prodigy': lambda: contrib.prodigy(0.1),
  'two steps': lambda: optax.MultiSteps(optax.lamb(0.01), 2).gradient_transformation(),
  'parts': lambda: optax.partition(
    {'matrix': optax.lamb(0.01), 'rest': optax.sgd(0.1)},
    lambda p: jax.tree.map(lambda d: 'matrix' if d.is_matrix else 'rest', weight_dims(p)),
  ),
  'a rate as state': lambda: optax.inject_hyperparams(optax.lamb)(lambda count: 0.01 / (1 + count)),
}


# SOAP's eigenvectors are not unique, and test_soap.py compares stacks
OFFERED = [
  name
  for name, (make, *_) in by_name.NAMED.items()
  if make.__module__.startswith('paxlite.') and name != 'soap'
]


def offered(name: str):
  e = TinyGPT(OPTIMIZER=name, LR_SCHEDULE='constant', LEARNING_RATE=0.01, WEIGHT_DECAY=0.1)
  return fdl.build(e.optimizer())


def models(seed: int):
  """Returns a model with a repeated stack of drawn sizes, boxed, and the layers of the same."""
  rng = np.random.default_rng(seed)
  L, D, N, H, F = (int(rng.integers(2, 6)) for _ in range(5))
  shapes = {'qkv': (3, D, N, H), 'up': (D, 128 + F), 'scale': (D,)}
  sizes = rng.lognormal(0, 2, L)  # the norms of layers differ
  value = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  layers = [{k: size * value(shape) for k, shape in shapes.items()} for size in sizes]
  box = lambda name, x, first=(): Weight(x, (*first, *AXES[name][0]), equation=AXES[name][1])
  head = Weight(value((D, 16)), ('embed', 'vocab'), equation='BTD,DV->BTV')
  stack = {k: box(k, jnp.stack([x[k] for x in layers]), ['layers']) for k in shapes}
  unrolled = {f'x_layers_{i}': {k: box(k, x[k]) for k in shapes} for i, x in enumerate(layers)}
  of = lambda stack: {'transformer': stack, 'head': {'w': head}}
  return of({'repeat': stack}), of(unrolled)


def trained(optimizer: Optimizer, boxed, steps: int = 3):
  with declared(lambda: boxed):
    state = optimizer.init(boxed)
    unbox = lambda tree: jax.tree.map(
      lambda x: getattr(x, 'value', x), tree, is_leaf=lambda x: isinstance(x, Weight)
    )
    params, state = unbox(boxed), unbox(state)

    @jax.jit
    def step(params, state, number):
      grads = jax.tree.map(lambda x: jnp.sin(number + 3 * x) * jnp.abs(x).max(), params)
      if 'repeat' in params['transformer']:  # the largest numbers of each layer
        most = lambda x: jnp.abs(x).max(tuple(range(1, x.ndim)), keepdims=True)
        of = lambda x: jnp.sin(number + 3 * x) * most(x)
        grads['transformer'] = jax.tree.map(of, params['transformer'])
      return optimizer.update(grads, optax.tree.norm(grads), True, state, params)

    for number in range(steps):
      params, state = step(params, state, number)
  return params


ALL = 'qkv', 'up', 'scale', 'head'
TRAINED = {'all': ALL, 'the stack': ALL[:3], 'one array': ALL[:1]}  # as LoRA trains a stack alone


def subset(boxed, names):
  """Returns the variables of these names."""
  layers = {k: {n: x for n, x in v.items() if n in names} for k, v in boxed['transformer'].items()}
  return {'transformer': layers, 'head': boxed['head'] if 'head' in names else {}}


@pytest.mark.cases(fast=4, slow=9)
@pytest.mark.parametrize('variables', TRAINED)
@pytest.mark.parametrize('name', [*OFFERED, *OWN])
def test_updates_of_a_stack_are_those_of_the_unrolled_model(name, variables):
  own = lambda: Optimizer(OWN[name](), clip_gradient_norm=5.0)
  optimizer = own() if name in OWN else offered(name)
  of = lambda boxed: trained(optimizer, subset(boxed, TRAINED[variables]))
  stacked, unrolled = map(of, models(len(name)))
  layers = unrolled.pop('transformer')
  of_layers = [layers[f'x_layers_{i}'] for i in range(len(layers))]
  expected = jax.tree.map(lambda *x: jnp.stack(x), *of_layers)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-6)
  jax.tree.map(close, stacked['transformer']['repeat'], expected)
  jax.tree.map(close, stacked['head'], unrolled['head'])


@pytest.mark.parametrize('name', ['adam', 'adamw', 'lion', 'sgd', 'muon', 'soap'])
def test_what_needs_no_mapping_is_as_it_was(name):
  optimizer = offered(name)
  boxed, _ = models(3)
  with declared(lambda: boxed):
    params = jax.tree.map(lambda x: x.value, boxed, is_leaf=lambda x: isinstance(x, Weight))
    state = optimizer._wrapped.init(params)
    text = str(jax.make_jaxpr(optimizer._wrapped.update)(params, state, params))
    plain = optimizer.transformation
    plain_state = plain.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(plain_state)
    if name in ('adam', 'muon', 'soap'):
      assert text == str(jax.make_jaxpr(plain.update)(params, state, params))


def test_counts_stay_scalars_and_arrays_have_their_layers_first():
  boxed, _ = models(4)
  params = jax.tree.map(lambda x: x.value, boxed, is_leaf=lambda x: isinstance(x, Weight))
  layers = len(params['transformer']['repeat']['scale'])
  for make in (OWN['lamb'], OWN['global norm']):
    state = per_layer(make()).init(params)
    assert all(x.shape == () for _, x in optax.tree.get_all_with_path(state, 'count'))
    sizes = {x.shape for x in jax.tree.leaves(state) if x.ndim}
    assert sizes == {x.shape for x in jax.tree.leaves(params)}
    assert (layers, *params['transformer']['repeat']['up'].shape[1:]) in sizes


def noise_of_a_count(key: jax.Array):
  """Returns a transformation that adds noise of a constant key and the count of updates."""

  def update(updates, count, params=None):
    keys = jax.random.split(jax.random.fold_in(key, count), len(jax.tree.leaves(updates)))
    tree = jax.tree.unflatten(jax.tree.structure(updates), list(keys))
    noisy = jax.tree.map(lambda x, k: x + jax.random.normal(k, x.shape), updates, tree)
    return noisy, count + 1

  return optax.GradientTransformation(lambda params: jnp.int32(0), update)


RANDOM = {
  'a key in the state': lambda seed: optax.add_noise(0.1, 0.5, seed),
  'with others': lambda seed: optax.chain(optax.trace(0.9), optax.add_noise(0.1, 0.5, seed)),
  'a constant key': lambda seed: noise_of_a_count(jax.random.key(seed)),
  'a raw key': lambda seed: noise_of_a_count(jax.random.PRNGKey(seed)),
}


@pytest.mark.parametrize('name', RANDOM)
def test_layers_draw_their_own_random_numbers(name):
  """And the same ones as the layers of the unrolled model, as the variables have the same order."""
  layers, size = (int(n) for n in np.random.default_rng(len(name)).integers(2, 6, 2))
  transformation = RANDOM[name](layers)
  params = {'repeat': {'w': jnp.ones((layers, size))}}
  unrolled = {'repeat': {str(i): {'w': jnp.ones(size)} for i in range(layers)}}
  ours = per_layer(transformation)
  state, expected = ours.init(params), transformation.init(unrolled)
  for _ in range(2):
    found, state = ours.update(params, state, params)
    plain, expected = transformation.update(unrolled, expected, unrolled)
    rows = [plain['repeat'][str(i)]['w'] for i in range(layers)]
    np.testing.assert_allclose(found['repeat']['w'], jnp.stack(rows), rtol=1e-5)
    assert len(np.unique(found['repeat']['w'])) == layers * size
