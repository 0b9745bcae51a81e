"""How the published models of Hunyuan are stored; see weights.family."""

import dataclasses

from paxlite.experiments.hunyuan import HunyuanDense
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, OneOf, Repeated, Same, heads
from paxlite.weights.family import Family
from paxlite.weights.family_keys import LENGTHS, NO_MLP_BIAS, SILU, UNTIED, unread
from paxlite.weights.rope_keys import _number, rope

HUNYUAN = tensor_names.HUGGING_FACE | {
  'query_norm': 'model.layers.{i}.self_attn.query_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.key_layernorm.weight',
}


def with_alpha(plain: Both) -> Both:
  """Returns keys in which rope_type dynamic with an alpha means another base, as in Hunyuan.

  Nothing else of such a dictionary is read. An export writes the base that it means.
  """

  def read(config: Config) -> dict[str, object]:
    given = config.get('rope_scaling') or config.get('rope_parameters') or {}
    kind, alpha = given.get('rope_type', given.get('type')), given.get('alpha')
    if kind != 'dynamic' or not alpha:
      return plain.read(config)
    width = config['head_dim']
    theta = _number(given.get('rope_theta', config.get('rope_theta', 10_000.0)), 'rope_theta')
    theta *= _number(alpha, 'alpha') ** (width / (width - 2))
    others = {k: v for k, v in config.items() if k not in plain.theirs}
    return plain.read(others | {'rope_theta': theta})

  return dataclasses.replace(plain, read=read)


FAMILIES: dict[str, Family] = {
  'hunyuan_v1_dense': Family(
    'HunYuanDenseV1ForCausalLM', HunyuanDense,
    (
      *LENGTHS, heads('head_dim'), SILU, UNTIED, with_alpha(rope()),
      Same('attention_bias', 'USE_BIAS', default=False),
      OneOf('use_qk_norm', True), OneOf('use_cla', False), NO_MLP_BIAS,
      Repeated('attention_head_dim', 'head_dim'), unread('org_vocab_size', 'pad_id'),
    ),
    HUNYUAN,
  ),
}  # fmt: skip
