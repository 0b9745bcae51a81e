"""Tiny models of the families that GGUF has, and tokenizers of each kind that llama.cpp has."""

import json
import math
import pathlib

from paxlite.data import packaged
from paxlite.tokenization.training import train
from paxlite.weights.gguf_tokenizer_writer import PIPELINES
from tests.support.tokenizer_draws import LEARNED_FROM, TEXTS

LLAMA3 = dict(
  rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=16,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
  beta_fast=4.0, truncate=True,
)  # fmt: skip
LINEAR = dict(rope_type='linear', rope_theta=1e4, factor=4.0)

_MAMBA = dict(
  time_step_limit=(0.0, math.inf), mamba_n_groups=1, mamba_proj_bias=False, mamba_conv_bias=True,
  rope_parameters=dict(rope_type='default', rope_theta=1e4),
)  # fmt: skip

# By name: a case of tests.support.families, and what differs from it.
MODELS: dict[str, tuple[str, dict]] = {
  'llama yarn': ('llama yarn', {}),
  'llama linear': ('llama yarn', dict(rope_parameters=LINEAR)),
  'llama3': ('llama yarn', dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
  'mistral': ('mistral wide heads', dict(sliding_window=None)),
  'mixtral': ('mixtral', dict(sliding_window=None)),
  'gemma2': ('gemma2', dict(query_pre_attn_scalar=10)),
  'gemma3': ('gemma3_text', dict(query_pre_attn_scalar=10)),
  'qwen2': ('qwen2', {}),
  'qwen3': ('qwen3', {}),
  'qwen3_moe': ('qwen3_moe', {}),
  'olmo2': ('olmo2', {}),
  'phi3': ('phi3', dict(sliding_window=None)),
  'granite': ('granite', dict(attention_bias=False, mlp_bias=False)),
  'glm4': ('glm4', dict(rope_parameters=dict(rope_type='default', rope_theta=1e4))),
  'glm4_moe': ('glm4_moe', dict(n_group=1, topk_group=1)),
  'lfm2': ('lfm2', dict(conv_bias=False)),
  'gpt_oss': ('gpt_oss', dict(rope_parameters=YARN)),
  'qwen3_5': ('qwen3_5_text', dict(linear_value_head_dim=12)),
  'qwen3_5_moe': ('qwen3_5_moe_text', dict(linear_value_head_dim=12)),
  'qwen3_next': ('qwen3_next', dict(linear_value_head_dim=12, norm_topk_prob=True)),
  'gemma4': ('gemma4_text', {}),
  'gemma4 experts': ('gemma4_text experts', {}),
  'gemma4 linked': ('gemma4_text linked', dict(num_kv_shared_layers=2)),
  'granite4': ('granitemoehybrid', _MAMBA),
  'granite4 dense': ('granitemoehybrid dense', _MAMBA | dict(attention_bias=False)),
  'granite4 attention': (
    'granitemoehybrid dense',
    _MAMBA | dict(attention_bias=False, layer_types=['full_attention'] * 4),
  ),
}

_LINES = [
  *LEARNED_FROM,
  *(f'The {i}. king of Judah said: word{i % 37} is  {i * i}' for i in range(99)),
]
TOKENIZERS = (
  'unigram', 'bpe', 'gpt-2', 'smollm', 'llama-bpe', 'dbrx', 'qwen2', 'first', 'never', 'prepend',
  'gemma', 'gpt-4o', 'qwen35',
)  # fmt: skip
# Special tokens in a text are found by tokenizers and llama.cpp, and not by SentencePiece. NFC is
# left out by llama.cpp.
PLAIN_TEXTS = [t for t in TEXTS if '<s>' not in t]
PLAIN_TEXTS += ['In the beginning God created the heaven and the earth', 'word36 is  1296', 'a']
TEXTS_OF = {
  'first': [t for t in PLAIN_TEXTS if not t.startswith((' ', '▁'))],
  **{name: [*TEXTS, 'a\n\n\n b'] for name in ('gpt-2', 'smollm', 'llama-bpe', 'dbrx', 'gpt-4o')},
}


def write_tokenizer(name: str, folder: pathlib.Path) -> None:
  """Writes a tokenizer of TOKENIZERS, as transformers or SentencePiece would."""
  folder.mkdir(parents=True)
  named = dict(eos_token='</s>', bos_token='<s>', unk_token='<unk>')
  named |= dict(chat_template='{% for m in messages %}{{ m.content }}</s>{% endfor %}')
  (folder / 'tokenizer_config.json').write_text(json.dumps(named))
  if name == 'unigram':
    content = (pathlib.Path(packaged.__path__[0]) / 'text8k.model').read_bytes()
    (folder / 'tokenizer.model').write_bytes(content)
  elif name == 'bpe':
    (folder / 'tokenizer.model').write_bytes(train(_LINES, 500, 'bpe'))
  elif name in PIPELINES:
    _write_byte_level(name, folder / 'tokenizer.json')
  else:
    _write_pieces(name, folder / 'tokenizer.json')


def _write_byte_level(name: str, path: pathlib.Path) -> None:
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers
  from tokenizers.trainers import BpeTrainer

  pipeline = PIPELINES[name]
  tokenizer = Tokenizer(models.BPE(ignore_merges=pipeline.ignores_merges))
  tree = json.loads(tokenizer.to_str())
  steps = [{'trim_offsets': True} | step for step in pipeline.pre_tokenizers]
  tree['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': steps}
  tree['normalizer'] = pipeline.normalizer and {'type': pipeline.normalizer}
  tokenizer = Tokenizer.from_str(json.dumps(tree))
  tokenizer.decoder = decoders.ByteLevel()
  trainer = BpeTrainer(
    vocab_size=600, special_tokens=['<unk>', '<s>', '</s>', '<|im_end|>'], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  tokenizer.train_from_iterator(_LINES, trainer)
  tokenizer.add_tokens(['<extra>'])
  tokenizer.save(str(path))


def _write_pieces(name: str, path: pathlib.Path) -> None:
  """Writes BPE with bytes for unknown characters, as it is made of SentencePiece's."""
  from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
  from tokenizers.trainers import BpeTrainer

  tokenizer = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  spaces = normalizers.Replace(' ', '▁')
  if name == 'prepend':
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), spaces])
  elif name == 'gemma':
    tokenizer.normalizer = spaces
    tokenizer.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
  else:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace('▁', prepend_scheme=name, split=False)
  special = ['<unk>', '<s>', '</s>']
  trainer = BpeTrainer(
    vocab_size=600, special_tokens=[*special, *(f'<0x{i:02X}>' for i in range(256))],
    limit_alphabet=120, show_progress=False,
  )  # fmt: skip
  tokenizer.train_from_iterator(_LINES, trainer)
  steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
  steps += [decoders.Strip(' ', 1, 0)] if name in ('first', 'prepend') else []
  tokenizer.decoder = decoders.Sequence(steps)
  tree = json.loads(tokenizer.to_str())
  tree['added_tokens'] = tree['added_tokens'][: len(special)]  # bytes are ordinary tokens
  path.write_text(json.dumps(tree))
