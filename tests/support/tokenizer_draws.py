"""Draws tokenizers as Hugging Face publishes them, chat templates and conversations."""

import json
import pathlib
import random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

LEARNED_FROM = [
  'The answer is a user who asks: what is it? 17 + 4 = 21.',
  'assistant user system model tool the the a an and  of   it\n\nThe user said "hi".\n',
  'Grüße aus Zürich — 東京 は 大きい 😀 é ñ, naïve café',
  'def f(x):\n    return x + 1\n\n# a comment\n',
] * 3
TEXTS = [
  '', 'hi', ' leading and trailing ', 'The answer is  two   spaces.',
  'line\n\n  next\ttab\r\nend\n', 'Grüße 😀😀 東京 e\u0301 ﬁ', '▁under ▁▁ bar',
  'it costs </s> and <|im_end|> and <s>x', '  \n ', 'foo_bar foo_barx <extra> tail',
  "don't we'll 's 12345 x²",
]  # fmt: skip
# The patterns of words of Llama 3, Qwen 2, GPT-4o and DeepSeek-V3.
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_LOWER, _UPPER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]', r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]'
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
  'llama3': [_LLAMA3],
  'qwen2': [_LLAMA3.replace('{1,3}', '')],
  'o200k': [
    rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}'
    r'|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
  ],
  'deepseek': [
    r'\p{N}{1,3}',
    '[一-龥\u3040-ゟ゠-ヿ]+',
    r'[!"#$%&\'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+'
    r'| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+',
  ],
}
_PIECES = [
  *' \n\t\r\x0b\x1c\x85\xa0\u2003\u2028\u3000\u200b\ufeff', '  ', '\r\n', '    ', *'0123456789',
  '1234567', *'٣²½Ⅷ①〇', *'.,;:!?\'"()<>@#$%&*-_=+\\/|`~', "'s", "'S", "'ſ", "'LL", "’s",
  *'—…€\u0301\u200d', '😀', '👩\u200d👩\u200d👧', '🇩🇪', '👍🏽', '❤\ufe0f', 'e\u0301', 'ﬁ',
  *'İſK東京大你好，안녕さ', 'мир', 'שלום', 'عالم', 'नमस्ते', 'The', ' the', ' answer', 'user',
  'is', ' it', 'def f(x):\n    return x',
]  # fmt: skip
MARKS = ['<|im_start|>', '<|im_end|>', '<|user|>', '<|assistant|>', '<end_of_turn>']

_EACH = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_THINK = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set why = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')
    if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or why) %}
{{- '<think>\n' + why + '\n</think>\n\n' + said }}
{%- else %}{{- said }}{% endif %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
TEMPLATES = {
  'zephyr': (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
  ),
  'mistral': (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}"
    '{% endfor %}'
  ),
  'chatml': (
    _EACH + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  'tools': (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}" + _EACH + '{{ m.content }}'
    "{% for c in m.tool_calls or [] %}{{ '<extra>' + (c.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  'gemma': (
    '{{ bos_token }}{% for m in messages %}'
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
  ),
  'plain': (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
  ),
  'think': _THINK,
  'generation': (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
}  # fmt: skip


def draw_text(rng: random.Random, marks: list[str]) -> str:
  """Returns a text of words, spaces and signs of many scripts, added tokens, and any characters."""
  pieces = []
  for _ in range(rng.choice([0, 1, 3, 10, 60])):
    drawn = rng.random()
    if drawn < 0.1 and marks:
      mark = rng.choice(marks)
      pieces.append(mark[: rng.choice([len(mark), len(mark), len(mark) - 1])])
    elif drawn < 0.2:
      code = rng.randrange(rng.choice([0x80, 0x800, 0xD800, 0x1FB00, 0x110000]))
      pieces.append(chr(code) if not 0xD800 <= code < 0xE000 else 'x')
    else:
      pieces.append(rng.choice(_PIECES) * rng.choice([1, 1, 1, 2, 5]))
  return ''.join(pieces)


def byte_level_tokenizer(splits: list[str], normalizer: Any = None) -> Tokenizer:
  """Returns a tokenizer of bytes with these patterns of words; none: those of GPT-2."""
  made = Tokenizer(models.BPE())
  made.normalizer = normalizer
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      *(pre_tokenizers.Split(Regex(pattern), 'isolated') for pattern in splits),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits),
    ]
  )
  made.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  sizes: dict[str, Any] = dict(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
  made.train_from_iterator(
    [*LEARNED_FROM, *_PIECES], BpeTrainer(special_tokens=['</s>', *MARKS], **sizes)
  )
  made.add_tokens([AddedToken('<think>', normalized=False), AddedToken('<extra>', special=True)])
  return made


def draw_tokenizer(rng: random.Random, folder: pathlib.Path, template: str) -> dict[str, Any]:
  """Writes the files of a tokenizer into a folder; returns what was drawn, for messages."""
  kind = rng.choice(['prepend', 'metaspace', 'byte_level', 'byte_level', 'unigram', 'word_piece'])
  drawn: dict[str, Any] = {'kind': kind}

  def pick(name: str, *choices: Any) -> Any:
    drawn[name] = rng.choice(choices)
    return drawn[name]

  specials = ['<unk>', '<s>', '</s>', *rng.sample(MARKS, rng.randint(0, len(MARKS)))]
  made, trainer = _untrained(kind, pick, specials)
  made.train_from_iterator(LEARNED_FROM, trainer)
  tree = json.loads(made.to_str())
  for entry in tree['added_tokens']:
    if entry['content'] in MARKS:
      entry |= {flag: rng.random() < 0.2 for flag in ('lstrip', 'rstrip', 'single_word')}
      entry['normalized'] = rng.random() < 0.2
      entry['special'] = rng.random() < 0.8
  if kind != 'unigram' and pick('holes', False, True):
    _make_holes(tree, rng)
  made = Tokenizer.from_str(json.dumps(tree))
  made.add_tokens(
    [AddedToken('<extra>', normalized=False), AddedToken('foo_bar', single_word=True)]
  )
  _frame(made, pick('frame', 'neither', 'bos', 'bos', 'both'), kind)
  made.save(str(folder / 'tokenizer.json'))
  _write_configuration(folder, pick, drawn, template)
  return drawn


def _untrained(kind: str, pick: Any, specials: list[str]) -> tuple[Tokenizer, Any]:
  sizes: dict[str, Any] = dict(vocab_size=420, special_tokens=specials, show_progress=False)
  if kind == 'unigram':
    made = Tokenizer(models.Unigram())
    made.normalizer = pick('normalizer', None, normalizers.NFKC())
    made.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme=pick('scheme', 'always', 'first', 'never'), split=True
    )
    made.decoder = decoders.Metaspace(prepend_scheme='always')
    return made, UnigramTrainer(unk_token='<unk>', **sizes)
  if kind == 'word_piece':
    made = Tokenizer(models.WordPiece(unk_token='<unk>'))
    made.normalizer = pick('normalizer', None, normalizers.BertNormalizer(lowercase=True))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made, WordPieceTrainer(**sizes)
  if kind == 'byte_level':
    made = Tokenizer(models.BPE())
    space = pick('add_prefix_space', False, False, True)
    words = pick('words', 'gpt2', 'digits')
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if words == 'digits':
      made.pre_tokenizer = pre_tokenizers.Sequence(
        [
          pre_tokenizers.Split(Regex(r'\p{N}{1,3}|\s+(?!\S)|\s+'), 'isolated'),
          pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
        ]
      )
    made.normalizer = pick('normalizer', None, normalizers.NFC())
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made, BpeTrainer(initial_alphabet=alphabet, **sizes)
  fallback = pick('byte_fallback', False, True)
  made = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=fallback))
  if fallback:
    sizes['special_tokens'] = [*specials, *(f'<0x{i:02X}>' for i in range(256))]
    sizes['vocab_size'] += 256
  if kind == 'prepend':
    made.normalizer = normalizers.Sequence(
      [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
    )
  else:
    made.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme=pick('scheme', 'always', 'first', 'never'), split=pick('split', False, True)
    )
  made.decoder = decoders.Sequence(
    [
      decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )  # fmt: skip
  return made, BpeTrainer(limit_alphabet=120, **sizes)


def _make_holes(tree: dict[str, Any], rng: random.Random) -> None:
  """Moves all ids from some number on upwards, so that ids below them have no token."""
  first, width = rng.randint(3, 300), rng.choice([1, 7, 64])
  moved = lambda i: i + width if i >= first else i
  tree['model']['vocab'] = {t: moved(i) for t, i in tree['model']['vocab'].items()}
  for entry in tree['added_tokens']:
    entry['id'] = moved(entry['id'])


def _frame(made: Tokenizer, frame: str, kind: str) -> None:
  ids = [(t, made.token_to_id(t)) for t in ('<s>', '</s>')]
  single = {'neither': '$A', 'bos': '<s> $A', 'both': '<s> $A </s>'}[frame]
  template = TemplateProcessing(single=single, special_tokens=ids)
  if kind == 'byte_level':
    made.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
  elif frame != 'neither':
    made.post_processor = template


def _write_configuration(
  folder: pathlib.Path, pick: Any, drawn: dict[str, Any], template: str
) -> None:
  kind = drawn['kind']
  stated = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
  contents: dict[str, Any] = {'chat_template': template}
  where = pick('stated', 'texts', 'objects', 'map')
  if where == 'map':
    (folder / 'special_tokens_map.json').write_text(json.dumps(stated))
  elif where == 'objects':
    flags = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)
    contents |= {k: {'__type': 'AddedToken', 'content': v, **flags} for k, v in stated.items()}
  else:
    contents |= stated
  for name in ('add_bos_token', 'add_eos_token'):
    if (value := pick(name, None, False, True)) is not None:
      contents[name] = value
  if pick('template_at', 'configuration', 'file') == 'file':
    (folder / 'chat_template.jinja').write_text(contents.pop('chat_template'))
  if pick('clean_up', False, True):
    contents['clean_up_tokenization_spaces'] = True
  names = ['PreTrainedTokenizerFast', 'PreTrainedTokenizerFast']
  if drawn.get('byte_fallback'):  # without it, this class drops what it does not know
    names += ['LlamaTokenizer', 'LlamaTokenizerFast']
    legacy = pick('legacy', None, False, True)
    contents |= {} if legacy is None else {'legacy': legacy}
  if kind == 'byte_level':
    names += ['GPT2Tokenizer', 'Qwen2TokenizerFast', 'LlamaTokenizerFast', None]
  name = pick('class', *names)
  contents |= {} if name is None else {'tokenizer_class': name}
  models_of = ['llama', 'mistral'] + (['gpt2', 'qwen2', 'qwen3'] if kind == 'byte_level' else [])
  (folder / 'config.json').write_text(json.dumps({'model_type': pick('model', *models_of)}))
  (folder / 'tokenizer_config.json').write_text(json.dumps(contents))


def draw_chat(rng: random.Random, template: str) -> list[dict[str, Any]]:
  """Returns messages that end with an answer."""
  says = lambda role: {'role': role, 'content': rng.choice(TEXTS[1:])}
  messages = [says('system')] if template not in ('mistral', 'gemma') and rng.random() < 0.3 else []
  for _ in range(rng.randint(1, 3)):
    messages += [says('user'), says('assistant')]
    if rng.random() < 0.1:
      messages[-1]['content'] = ''
    if template == 'think' and rng.random() < 0.4:
      messages[-1]['content'] = '<think>\nwhy\n</think>\n\n' + messages[-1]['content']
    if template == 'tools' and rng.random() < 0.5:
      function = {'name': 'f', 'arguments': {'x': rng.choice(TEXTS)}}
      messages[-1]['tool_calls'] = [{'type': 'function', 'function': function}]
      messages += [says('tool'), says('assistant')]
  return messages
