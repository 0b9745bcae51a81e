"""The keys of config.json that several families share, and the functions that make some of them."""

from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Repeated,
  Same,
  activation,
  heads,
  positions,
  tied,
  window,
)
from paxlite.weights.rope_keys import rope

LENGTHS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
  Same('rms_norm_eps', 'LAYERNORM_EPSILON'),
)
SIZES = (*LENGTHS, heads())
GIVEN_KV = (*LENGTHS, heads('num_key_value_heads'))  # where transformers has another default
GIVEN_HEADS = (*LENGTHS, heads('num_key_value_heads', 'head_dim'))
EXPERT_SILU = activation('hidden_act', ours=('EXPERT_ACTIVATION_CLS',))
SILU = activation('hidden_act')
NO_BIAS = OneOf('attention_bias', False)
NO_MLP_BIAS = OneOf('mlp_bias', False)
UNTIED, TIED = tied(default=False), tied(default=True)
COMMON = (SILU, UNTIED, rope())
PLAIN = (*SIZES, *COMMON)
WINDOW = window()
GEMMA = (*GIVEN_HEADS, TIED, NO_BIAS, OneOf('use_bidirectional_attention', False))
GELU = activation('hidden_activation', 'hidden_act', default='gelu_pytorch_tanh')
GEMMA2 = (*GEMMA, GELU, Same('query_pre_attn_scalar', 'QUERY_PRE_ATTN_SCALAR'))
EXPERTS_PER_TOKEN = Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN')
NORM_TOPK = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=False)


def either(attribute: str, *keys: str) -> Both:
  """Returns one attribute that versions of transformers write under different keys."""

  def read(config: Config) -> dict[str, object]:
    return {attribute: config[next((k for k in keys if k in config), keys[0])]}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: getattr(e, attribute)})


def counted(key: str, attribute: str, null: int) -> Both:
  """Returns a number that some files have as null, which transformers can compute with no more."""
  same = Same(key, attribute, null=null)
  return Both((key,), (attribute,), same.read, lambda e: {key: getattr(e, attribute)})


DEEPSEEK = (
  *LENGTHS,
  Same('num_attention_heads', 'NUM_HEADS'),
  Same('hidden_size', 'MODEL_DIMS'),
  Same('kv_lora_rank', 'LATENT_DIMS'),
  Same('q_lora_rank', 'QUERY_LATENT_DIMS', null=0),
  Same('qk_nope_head_dim', 'DIMS_PER_HEAD'),
  Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD'),
  Same('v_head_dim', 'VALUE_DIMS_PER_HEAD'),
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  counted('n_shared_experts', 'NUM_SHARED_EXPERTS', 0),
  Same('first_k_dense_replace', 'NUM_DENSE_BLOCKS'),
  Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
  OneOf('moe_layer_freq', 1),
  Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'),
  Repeated('head_dim', 'qk_rope_head_dim'),
  EXPERTS_PER_TOKEN,
  activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
  UNTIED,
  rope(has_mscale=True),
  NO_BIAS,
  NO_MLP_BIAS,
)
GROUPS = (
  counted('n_group', 'NUM_EXPERT_GROUPS', 1),
  counted('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', 1),
)


def routing(methods: tuple[str, str], scores: str) -> Both:
  """Returns the keys that say how DeepSeek chooses experts, and keys that repeat other sizes.

  Args:
    methods: The values of topk_method for one group and for several.
    scores: The value of scoring_func.
  """
  plain, grouped = methods
  names = ('n_group', 'topk_group', 'topk_method', 'scoring_func')

  def read(config: Config) -> dict[str, object]:
    OneOf('topk_method', plain, grouped).read(config)
    OneOf('scoring_func', scores).read(config)
    if config.get('topk_method', plain) != grouped:
      return {'NUM_EXPERT_GROUPS': 1, 'NUM_EXPERT_GROUPS_PER_TOKEN': 1}
    return GROUPS[0].read(config) | GROUPS[1].read(config)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, MixtureOfExperts)
    method = plain if e.NUM_EXPERT_GROUPS == 1 else grouped
    groups = GROUPS[0].write(e) | GROUPS[1].write(e)
    return groups | {'topk_method': method, 'scoring_func': scores}

  ours = tuple(name for key in GROUPS for name in key.ours)
  return Both(names, ours, read, write)
