"""The variable that each tensor of a published model becomes, and the order of its elements.

One table for each family serves both directions. The transforms return views, so that a tensor is
never copied as one array on its way (see variables.blocks).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel

Transform = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a published model, and the variable of paxlite that it becomes.

  Attributes:
    theirs: Name of the tensor.
    shape: Shape of the tensor.
    ours: Name of the variable.
    our_shape: Shape of the variable.
    to_ours: Returns a view of the tensor with its elements in the order of the variable's.
    to_theirs: The reverse of to_ours, for a variable in its own shape.
    part: Index of the tensor in the first dimension of a variable that combines queries, keys and
      values; None: the tensor is the entire variable.
  """

  theirs: str
  shape: tuple[int, ...]
  ours: str
  our_shape: tuple[int, ...]
  to_ours: Transform
  to_theirs: Transform
  part: int | None = None


# Names of tensors by role; {i} is the layer's number.
HUGGING_FACE = {
  'embedding': 'model.embed_tokens.weight',
  'final_norm': 'model.norm.weight',
  'head': 'lm_head.weight',
  'attention_norm': 'model.layers.{i}.input_layernorm.weight',
  'ffn_norm': 'model.layers.{i}.post_attention_layernorm.weight',
  'query': 'model.layers.{i}.self_attn.q_proj.weight',
  'key': 'model.layers.{i}.self_attn.k_proj.weight',
  'value': 'model.layers.{i}.self_attn.v_proj.weight',
  'post': 'model.layers.{i}.self_attn.o_proj.weight',
  'gate': 'model.layers.{i}.mlp.gate_proj.weight',
  'up': 'model.layers.{i}.mlp.up_proj.weight',
  'down': 'model.layers.{i}.mlp.down_proj.weight',
}
META = {
  'embedding': 'tok_embeddings.weight',
  'final_norm': 'norm.weight',
  'head': 'output.weight',
  'attention_norm': 'layers.{i}.attention_norm.weight',
  'ffn_norm': 'layers.{i}.ffn_norm.weight',
  'query': 'layers.{i}.attention.wq.weight',
  'key': 'layers.{i}.attention.wk.weight',
  'value': 'layers.{i}.attention.wv.weight',
  'post': 'layers.{i}.attention.wo.weight',
  'gate': 'layers.{i}.feed_forward.w1.weight',
  'up': 'layers.{i}.feed_forward.w3.weight',
  'down': 'layers.{i}.feed_forward.w2.weight',
}
GGUF = {
  'embedding': 'token_embd.weight',
  'final_norm': 'output_norm.weight',
  'head': 'output.weight',
  'attention_norm': 'blk.{i}.attn_norm.weight',
  'ffn_norm': 'blk.{i}.ffn_norm.weight',
  'query': 'blk.{i}.attn_q.weight',
  'key': 'blk.{i}.attn_k.weight',
  'value': 'blk.{i}.attn_v.weight',
  'post': 'blk.{i}.attn_output.weight',
  'gate': 'blk.{i}.ffn_gate.weight',
  'up': 'blk.{i}.ffn_up.weight',
  'down': 'blk.{i}.ffn_down.weight',
}


def check_layers(e: LanguageModel, shapes: Mapping[str, Any]) -> None:
  """Raises UserError if there are fewer tensors than layers.

  NUM_LAYERS comes from a file and may be any number.
  """
  if len(shapes) < e.NUM_LAYERS:
    raise UserError(f'{len(shapes):,} tensors are too few for NUM_LAYERS={e.NUM_LAYERS:,}')


def llama_entries(e: LanguageModel, names: Mapping[str, str], rotary: str) -> list[Entry]:
  """Returns the entries of LLaMA, Mistral and Gemma: linear layers [out, in] without biases.

  Args:
    e: The experiment.
    names: Names of the tensors by role: one of the tables above.
    rotary: Layout of the rotary pairs in the published queries and keys; see RotaryEmbedding.
  """
  D, F, V = e.MODEL_DIMS, e.HIDDEN_DIMS, e.VOCAB_SIZE
  N, G, H = e.NUM_HEADS, e.NUM_KV_HEADS, e.DIMS_PER_HEAD
  swap = rotary != e.ROPE_LAYOUT
  entries = [
    _same(names['embedding'], (V, D), 'embedding/emb_var'),
    _same(names['final_norm'], (D,), 'final_ln/scale'),
  ]
  if e.SEPARATE_EMBEDDING:
    entries.append(_same(names['head'], (V, D), 'softmax/w'))
  for i in range(e.NUM_LAYERS):
    name = {role: text.format(i=i) for role, text in names.items()}
    layer = f'transformer/x_layers_{i}'
    qkv = f'{layer}/self_attention/qkv'
    entries += [
      _same(name['attention_norm'], (D,), f'{layer}/layer_norm/scale'),
      _same(name['ffn_norm'], (D,), f'{layer}/ff_layer_norm/scale'),
      _transposed(name['gate'], (F, D), f'{layer}/ff_layer/ffn_layer1_gate/w'),
      _transposed(name['up'], (F, D), f'{layer}/ff_layer/ffn_layer1/w'),
      _transposed(name['down'], (D, F), f'{layer}/ff_layer/ffn_layer2/w'),
      Entry(
        name['post'],
        (D, N * H),
        f'{layer}/self_attention/post/w',
        (D, N, H),
        to_ours=lambda x: x,
        to_theirs=lambda w: w.reshape(len(w), -1),
      ),
    ]
    for part, (role, heads) in enumerate((('query', N), ('key', G), ('value', G))):
      halves = swap and role != 'value'
      to_ours, to_theirs = _heads(heads, H, e.ROPE_LAYOUT if halves else None)
      entry = functools.partial(
        Entry, name[role], (heads * H, D), to_ours=to_ours, to_theirs=to_theirs
      )
      if N == G:
        entries.append(entry(f'{qkv}/combined/w', (3, D, N, H), part=part))
      else:
        entries.append(entry(f'{qkv}/{role}/w', (D, heads, H)))
  return entries


def gpt2_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of Hugging Face's GPT-2.

  Its layers are [in, out] with biases. Queries, keys and values are one tensor.
  """
  D, F, N, H = e.MODEL_DIMS, e.HIDDEN_DIMS, e.NUM_HEADS, e.DIMS_PER_HEAD
  entries = [
    _same('wte.weight', (e.VOCAB_SIZE, D), 'embedding/emb_var'),
    _same('wpe.weight', (e.MAX_SEQ_LEN, D), 'position_emb/emb_var'),
    _same('ln_f.weight', (D,), 'final_ln/scale'),
    _same('ln_f.bias', (D,), 'final_ln/bias'),
  ]
  for i in range(e.NUM_LAYERS):
    layer, theirs = f'transformer/x_layers_{i}', f'h.{i}'
    combined, post = f'{layer}/self_attention/qkv/combined', f'{layer}/self_attention/post'
    for norm, ours in (('ln_1', 'layer_norm'), ('ln_2', 'ff_layer_norm')):
      entries += [
        _same(f'{theirs}.{norm}.weight', (D,), f'{layer}/{ours}/scale'),
        _same(f'{theirs}.{norm}.bias', (D,), f'{layer}/{ours}/bias'),
      ]
    entries += [
      Entry(
        f'{theirs}.attn.c_attn.weight',
        (D, 3 * D),
        f'{combined}/w',
        (3, D, N, H),
        to_ours=lambda x: x.reshape(D, 3, D).transpose(1, 0, 2),
        to_theirs=lambda w: w.transpose(1, 0, 2, 3),
      ),
      _same(f'{theirs}.attn.c_attn.bias', (3 * D,), f'{combined}/b', (3, N, H)),
      Entry(
        f'{theirs}.attn.c_proj.weight',
        (N * H, D),
        f'{post}/w',
        (D, N, H),
        to_ours=lambda x: x.T,
        to_theirs=lambda w: w.transpose(1, 2, 0),
      ),
      _same(f'{theirs}.attn.c_proj.bias', (D,), f'{post}/b'),
      _same(f'{theirs}.mlp.c_fc.weight', (D, F), f'{layer}/ff_layer/ffn_layer1/w'),
      _same(f'{theirs}.mlp.c_fc.bias', (F,), f'{layer}/ff_layer/ffn_layer1/b'),
      _same(f'{theirs}.mlp.c_proj.weight', (F, D), f'{layer}/ff_layer/ffn_layer2/w'),
      _same(f'{theirs}.mlp.c_proj.bias', (D,), f'{layer}/ff_layer/ffn_layer2/b'),
    ]
  return entries


def to_halves(x: np.ndarray, axis: int) -> np.ndarray:
  """Reorders interleaved rotary pairs (2i, 2i+1) as (i, i + H/2).

  Dimension `axis`, H, becomes [2, H/2].
  """
  shape = (*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
  return x.reshape(shape).swapaxes(axis, axis + 1)


def to_pairs(x: np.ndarray, axis: int) -> np.ndarray:
  """Reverses to_halves: dimension `axis`, H, becomes [H/2, 2]."""
  shape = (*x.shape[:axis], 2, x.shape[axis] // 2, *x.shape[axis + 1 :])
  return x.reshape(shape).swapaxes(axis, axis + 1)


def _same(
  theirs: str, shape: tuple[int, ...], ours: str, our_shape: tuple[int, ...] | None = None
) -> Entry:
  identity: Transform = lambda x: x
  return Entry(theirs, shape, ours, our_shape or shape, identity, identity)


def _transposed(theirs: str, shape: tuple[int, ...], ours: str) -> Entry:
  transpose: Transform = lambda x: x.T
  return Entry(theirs, shape, ours, shape[::-1], transpose, transpose)


def _heads(heads: int, head_dim: int, ours: Any) -> tuple[Transform, Transform]:
  """Returns the transforms [heads·H, D] → [D, heads, H] and back.

  They convert rotary pairs to layout `ours` and back, unless `ours` is None.
  """
  into = {'interleaved': to_pairs, 'half': to_halves}.get(ours)
  out_of = {'interleaved': to_halves, 'half': to_pairs}.get(ours)

  def to_ours(x: np.ndarray) -> np.ndarray:
    x = x.reshape(heads, head_dim, -1)
    x = x if into is None else into(x, 1)
    return np.moveaxis(x, -1, 0)

  def to_theirs(w: np.ndarray) -> np.ndarray:
    w = np.moveaxis(w, 0, -1)
    return w if out_of is None else out_of(w, 1)

  return to_ours, to_theirs
