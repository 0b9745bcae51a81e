"""Reads tests/parity/reference/*.npz, which praxis computed, as trees of paxlite.

Computed in fp32 on CPU with matmul precision 'highest'. Every parameter is its initial value +
0.05·N(0, 1).
"""

import json
import pathlib
import re

import numpy as np
from flax import traverse_util

REFERENCE = pathlib.Path(__file__).parents[1] / 'parity' / 'reference'

# praxis path → (paxlite path, transposed)
_RULES = [
  (r'lm/softmax/logits_ffn/linear/w', None),  # tied or separate: decided below
  (r'lm/embedding_lookup/emb_var', 'embedding/emb_var'),
  (r'lm/transformer/repeat/sub/x_layers_0/', 'transformer/repeat/'),
  (r'lm/', ''),
  (r'ff_layer/layer_norm/', 'ff_layer_norm/'),
  (r'/(linear|bias)/(w|b|lora_a|lora_b)$', r'/\2'),
  # praxis adds A·Bᵀ to post's w [D, N, H] without transposing, so its A gives D, as our B does.
  (r'post/lora_a$', 'post/lora_swapped'),
  (r'post/lora_b$', 'post/lora_a'),
  (r'post/lora_swapped$', 'post/lora_b'),
  (r'self_attention/combined_qkv/', 'self_attention/qkv/combined/'),
]


# The names of GLaM, whose layers are pairs in paxlite.
_GLAM_RULES = [
  (r'^lm/softmax/embedding/w$', 'embedding/emb_var'), (r'^lm/', ''),
  (r'ff_layer/layer_norm/', 'ff_layer_norm/'), (r'/linear/w$', '/w'),
  (r'ff_layer/gate$', 'ff_layer/router/gate'), (r'ff_layer/wi_0$', 'ff_layer/w_in'),
  (r'ff_layer/wo_0$', 'ff_layer/w_out'),
  (r'self_attention/(query|key|value)/w$', r'self_attention/qkv/\1/w'),
  (r'self_attention/relative_bias/', 'self_attention/dot_product/relative_bias/'),
]  # fmt: skip


def glam_path(path: str) -> str:
  for pattern, replacement in _GLAM_RULES:
    path = re.sub(pattern, replacement, path)
  pair = lambda m: f'x_layers_{int(m[1]) // 2}/x_layers_{int(m[1]) % 2}'
  return re.sub(r'x_layers_(\d+)', pair, path)


def glam_tree(reference: dict[str, np.ndarray], kind: str, num_heads: int) -> dict:
  """Does the same as `tree`, and gives attention weights the dimensions of heads."""
  ours = {}
  for path, value in reference.items():
    if not path.startswith(f'{kind}/'):
      continue
    name = glam_path(path.removeprefix(f'{kind}/'))
    if name.endswith('post/w'):
      value = value.T  # [N·H, D] in praxis, [D, N, H] in paxlite
    if '/qkv/' in name or name.endswith('post/w'):
      value = value.reshape(value.shape[0], num_heads, -1)
    ours[name] = value
  return traverse_util.unflatten_dict(ours, sep='/')


def load(name: str) -> dict[str, np.ndarray]:
  with np.load(REFERENCE / f'{name}.npz') as z:
    return {k: z[k] for k in z}


def init_stats(name: str) -> dict[str, tuple[list[int], float, float]]:
  return json.loads((REFERENCE / f'{name}_init_stats.json').read_text())


def our_path(path: str, tied: bool) -> str:
  if path == 'lm/softmax/logits_ffn/linear/w':
    return 'embedding/emb_var' if tied else 'softmax/w'
  for pattern, replacement in _RULES[1:]:
    path = re.sub(pattern, replacement, path)
  return path


def tree(reference: dict[str, np.ndarray], kind: str) -> dict:
  """Returns 'params' or 'grads' of a reference as a nested dict in paxlite's names and layouts."""
  flat = {k.removeprefix(f'{kind}/'): v for k, v in reference.items() if k.startswith(f'{kind}/')}
  tied = 'lm/embedding_lookup/emb_var' not in flat
  ours = {}
  for path, value in flat.items():
    if path == 'lm/softmax/logits_ffn/linear/w':
      value = value.T  # [D, V] in praxis, [V, D] in paxlite
    ours[our_path(path, tied)] = value
  return traverse_util.unflatten_dict(ours, sep='/')


def batch(reference: dict[str, np.ndarray], packed: bool = True) -> dict[str, np.ndarray]:
  b = {k: reference[f'in/{k}'] for k in ('ids', 'labels', 'weights', 'segment_pos')}
  b['segment_ids'] = reference['in/segment_ids'] * (1 - reference['in/paddings']).astype(np.int32)
  return b
