"""What optimizers know of the dimensions of each variable, for several families."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import paxlite
from paxlite.core.errors import UserError
from paxlite.core.variable_names import path_name
from paxlite.parallel.weight_dims import declared, dims_of, muon_dims, weight_dims

# For each variable of a layer its dimensions: s is stacked, i an input, o an output, and capitals
# are those of heads. A variable with + holds matrices, and one with = is a table.
FEED_FORWARD = {
  'ff_layer/ffn_layer1/w': 'io+',
  'ff_layer/ffn_layer1_gate/w': 'io+',
  'ff_layer/ffn_layer2/w': 'io+',
}
NORMS = {'ff_layer_norm/scale': 'o', 'layer_norm/scale': 'o'}
POST = {'self_attention/post/w': 'oIi+'}
GROUPED = {f'self_attention/qkv/{name}/w': 'iOo+' for name in ('query', 'key', 'value')} | POST
LATENT = POST | {
  'self_attention/key_value/w': 'iOo+', 'self_attention/latent/w': 'io+',
  'self_attention/latent_norm/scale': 'o', 'self_attention/query/w': 'iOo+',
  'self_attention/query_latent/w': 'io+', 'self_attention/query_latent_norm/scale': 'o',
}  # fmt: skip
EXPERTS = {'router/gate': 'io+', 'w_in': 'sio+', 'w_in_gate': 'sio+', 'w_out': 'sio+'}
at = lambda prefix, dims: {f'{prefix}/{name}': d for name, d in dims.items()}
LORA = {'lora_a': 'io+', 'lora_b': 'oi+'}
# of this part of the path, the expected variables, and the others of the model
LLAMA = {'embedding/emb_var': 'io=', 'softmax/w': 'oi=', 'final_ln/scale': 'o'}
GPT = {
  'embedding/emb_var': 'io=', 'position_emb/emb_var': 'io=', 'final_ln/scale': 'o',
  'final_ln/bias': 'o',
}  # fmt: skip
COMBINED = {
  **POST,
  'self_attention/post/b': 'o',
  'self_attention/qkv/combined/w': 'siOo+',
  'self_attention/qkv/combined/b': 'sOo',
  'ff_layer/ffn_layer1/w': 'io+',
  'ff_layer/ffn_layer1/b': 'o',
  'ff_layer/ffn_layer2/w': 'io+',
  'ff_layer/ffn_layer2/b': 'o',
  **NORMS,
  'ff_layer_norm/bias': 'o',
  'layer_norm/bias': 'o',
}
BIASED_EXPERTS = {'router/b': 'o', 'b_in': 'so', 'b_in_gate': 'so', 'b_out': 'so'}
FAMILIES = {
  'LLaMA3_8B': (LLAMA, {'': GROUPED | FEED_FORWARD | NORMS}, dict(NUM_LAYERS=1)),
  'TinyGPT': (GPT, {'': COMBINED}, {}),
  'TinyGPT with LoRA': (
    GPT,
    {
      '': COMBINED
      | at('ff_layer/ffn_layer1', LORA)
      | at('ff_layer/ffn_layer2', LORA)
      | at('self_attention/post', LORA)
      | at('self_attention/qkv/combined', {'lora_a': 'sio+', 'lora_b': 'soi+'})
    },
    dict(USE_LORA=True),
  ),
  'Mixtral_8x7B': (LLAMA, {'': GROUPED | at('ff_layer', EXPERTS) | NORMS}, dict(NUM_LAYERS=1)),
  'DeepSeekV3_671B': (
    LLAMA,
    {
      'first_': LATENT | FEED_FORWARD | NORMS,
      '': LATENT
      | NORMS
      | at('ff_layer/experts', EXPERTS)
      | at('ff_layer/shared', {k.removeprefix('ff_layer/'): d for k, d in FEED_FORWARD.items()})
      | {'ff_layer/experts/router/replaced_bias': 'o'},
    },
    dict(NUM_LAYERS=4),
  ),
  'GptOss20B': (
    LLAMA,
    {
      '': GROUPED
      | at('ff_layer', EXPERTS | BIASED_EXPERTS)
      | NORMS
      | {f'self_attention/qkv/{name}/b': 'Oo' for name in ('query', 'key', 'value')}
      | {'self_attention/post/b': 'o', 'self_attention/dot_product/sinks/logits': 'o'}
    },
    dict(NUM_LAYERS=2),
  ),
}


def letters(box) -> str:
  dims = dims_of(box)
  kinds = {'s': dims.stacked, 'i': dims.inputs, 'o': dims.outputs}
  of = lambda i: next(kind for kind, indices in kinds.items() if i in indices)
  found = [of(i).upper() if i in dims.heads else of(i) for i in range(box.value.ndim)]
  assert sum(map(len, kinds.values())) == box.value.ndim
  return ''.join(found) + '+' * dims.is_matrix + '=' * dims.is_table


def boxes_of(name: str, **values):
  task = fdl.build(paxlite.get(name.split()[0])(**values).build_task())
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  leaves = jax.tree_util.tree_leaves_with_path(task.boxed_params(), is_leaf=is_box)
  return {path_name(path): box for path, box in leaves}


@pytest.mark.cases(fast=5, slow=1)
@pytest.mark.parametrize('is_repeated', [False, True])
@pytest.mark.parametrize('name', FAMILIES)
def test_every_variable_of_a_family_knows_its_dimensions(name, is_repeated):
  outside, layers, values = FAMILIES[name]
  found = boxes_of(name, USE_REPEATED_LAYER=is_repeated, **values)
  seen: dict[str, set[str]] = {kind: set() for kind in layers}
  for path, box in found.items():
    if not path.startswith('transformer/'):
      assert letters(box) == outside[path], path
      continue
    layer, _, rest = path.removeprefix('transformer/').partition('/')
    stack = 's' if layer == 'repeat' else ''
    while rest.startswith('x_layers_'):  # in a sequence of blocks
      rest = rest.partition('/')[2]
    kind = next(k for k in layers if layer.startswith(k))
    assert letters(box) == stack + layers[kind][rest], path
    seen[kind].add(rest)
  assert set(outside) == {p for p in found if not p.startswith('transformer/')}
  assert seen == {kind: set(dims) for kind, dims in layers.items()}
  assert any('/repeat/' in path for path in found) == is_repeated


def test_what_is_no_weight_of_a_product_is_no_matrix():
  """T5's bias [heads, buckets], as an example, is looked up."""
  found = boxes_of('GLaM126M64E', NUM_LAYERS=2)
  (wrb, *_) = (letters(box) for path, box in found.items() if path.endswith('wrb'))
  assert wrb == 'oo'


def test_dimensions_are_known_for_gradients_and_parts_of_them_and_only_where_they_are_declared():
  boxes = fdl.build(paxlite.get('TinyGPT')(USE_REPEATED_LAYER=True).build_task()).boxed_params
  weight = {'combined': {'w': jnp.zeros((2, 3, 32, 4, 8))}}
  params = {
    'transformer': {'repeat': {'self_attention': {'qkv': weight}, 'mine': jnp.ones((2, 3))}}
  }
  with declared(boxes):
    of_stack = jax.jit(lambda x: jnp.ones(len(weight_dims(x)['transformer'])))(params)
    assert of_stack.shape == (1,)
    found = weight_dims(params)['transformer']['repeat']
    assert found['self_attention']['qkv']['combined']['w'].stacked == (0, 1)
    assert (found['mine'].stacked, found['mine'].is_matrix) == ((0,), False)
    muon = muon_dims(params)['transformer']['repeat']
    assert muon['self_attention']['qkv']['combined']['w'] == ((2,), (3, 4))
    assert muon['mine'] is None
    masked = optax.partition({'a': optax.sgd(1.0), 'b': optax.stateless(
      lambda grads, _: jax.tree.map(lambda g, d: g * len(d.stacked), grads, weight_dims(grads))
    )}, {'transformer': {'repeat': {'self_attention': 'b', 'mine': 'a'}}})  # fmt: skip
    masked.update(params, masked.init(params), params)
  with pytest.raises(UserError, match="outside an optimizer's init and update"):
    weight_dims(params)
