"""How the published models of GPT-2 are stored; see weights.family."""

from paxlite.experiments.gpt import GPT2
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, OneOf, Same, activation, positions
from paxlite.weights.family import Family
from paxlite.weights.tensor_entries import Entry, same


def gpt2_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of Hugging Face's GPT-2.

  Its layers are [in, out] with biases. Queries, keys and values are one tensor.
  """
  D, F, N, H = e.MODEL_DIMS, e.HIDDEN_DIMS, e.NUM_HEADS, e.DIMS_PER_HEAD
  entries = [
    same('wte.weight', (e.VOCAB_SIZE, D), 'embedding/emb_var'),
    same('wpe.weight', (e.MAX_POSITION_EMBEDDINGS, D), 'position_emb/emb_var'),
    same('ln_f.weight', (D,), 'final_ln/scale'),
    same('ln_f.bias', (D,), 'final_ln/bias'),
  ]
  for i in range(e.NUM_LAYERS):
    layer, theirs = f'transformer/x_layers_{i}', f'h.{i}'
    combined, post = f'{layer}/self_attention/qkv/combined', f'{layer}/self_attention/post'
    for norm, ours in (('ln_1', 'layer_norm'), ('ln_2', 'ff_layer_norm')):
      entries += [
        same(f'{theirs}.{norm}.weight', (D,), f'{layer}/{ours}/scale'),
        same(f'{theirs}.{norm}.bias', (D,), f'{layer}/{ours}/bias'),
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
      same(f'{theirs}.attn.c_attn.bias', (3 * D,), f'{combined}/b', (3, N, H)),
      Entry(
        f'{theirs}.attn.c_proj.weight',
        (N * H, D),
        f'{post}/w',
        (D, N, H),
        to_ours=lambda x: x.T,
        to_theirs=lambda w: w.transpose(1, 2, 0),
      ),
      same(f'{theirs}.attn.c_proj.bias', (D,), f'{post}/b'),
      same(f'{theirs}.mlp.c_fc.weight', (D, F), f'{layer}/ff_layer/ffn_layer1/w'),
      same(f'{theirs}.mlp.c_fc.bias', (F,), f'{layer}/ff_layer/ffn_layer1/b'),
      same(f'{theirs}.mlp.c_proj.weight', (F, D), f'{layer}/ff_layer/ffn_layer2/w'),
      same(f'{theirs}.mlp.c_proj.bias', (D,), f'{layer}/ff_layer/ffn_layer2/b'),
    ]
  return entries


FAMILIES: dict[str, Family] = {
  'gpt2': Family(
    'GPT2LMHeadModel', GPT2,
    (
      Same('n_layer', 'NUM_LAYERS'), Same('n_head', 'NUM_HEADS'), Same('n_embd', 'MODEL_DIMS'),
      Same('vocab_size', 'VOCAB_SIZE'), positions('n_positions'),
      Same('layer_norm_epsilon', 'LAYERNORM_EPSILON'),
      activation('activation_function', written='gelu_new'),
      Both(
        ('n_inner', 'n_ctx'),
        ('HIDDEN_DIMS',),
        lambda c: {'HIDDEN_DIMS': c.get('n_inner') or 4 * c['n_embd']},
        lambda e: {'n_inner': e.HIDDEN_DIMS},
      ),
      OneOf('tie_word_embeddings', True), OneOf('scale_attn_weights', True),
      OneOf('scale_attn_by_inverse_layer_idx', False), OneOf('add_cross_attention', False),
      # the softmax is in float32 whatever this says
      OneOf('reorder_and_upcast_attn', False, True),
    ),
    {},
    entries=gpt2_entries,
    classifier=None,
  ),
}  # fmt: skip
