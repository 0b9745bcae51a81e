"""Drawn tokenizers, and drawn requests of EleutherAI's harness to a tiny model."""

import json
import pathlib
import random
from typing import Any

# Templates that write BOS themselves, and one that does not.
LLAMA3 = (
  "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|stop|>\n\n' + "
  "m.content | trim + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
MISTRAL = (
  "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
  "' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
  "{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
CHATML = (
  "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|stop|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# By name: the pre-tokenizer, whether the post-processor adds BOS, whether tokenizer_config.json
# names BOS, and the template.
TOKENIZERS = {
  'bytes, BOS by both': ('bytes', True, True, LLAMA3),
  'bytes, BOS by the post-processor': ('bytes', True, True, CHATML),
  'bytes, BOS by name': ('bytes', False, True, CHATML),
  'bytes, no BOS': ('bytes', False, False, CHATML),
  'metaspace, BOS by both': ('always', True, True, MISTRAL),
  'metaspace at the first word': ('first', True, True, MISTRAL),
  'metaspace, no BOS': ('always', False, False, CHATML),
}
SPECIAL = ['<s>', '</s>', '<|start|>', '<|stop|>', '<|eot|>']
SIZE = 320
POSITIONS = 64


def write_tokenizer(folder: pathlib.Path, name: str, text: str) -> None:
  """Trains a tokenizer of TOKENIZERS on a text, and writes it as transformers does."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

  kind, adds_bos, names_bos, template = TOKENIZERS[name]
  tokenizer = Tokenizer(models.BPE(unk_token=None if kind == 'bytes' else '<unk>'))
  if kind == 'bytes':
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
  else:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace('▁', kind, split=True)
    tokenizer.decoder = decoders.Metaspace('▁', kind, split=True)
    alphabet = sorted({*text, '▁', 'é', 'ß'})
  special = SPECIAL if kind == 'bytes' else [*SPECIAL, '<unk>']
  tokenizer.train_from_iterator(
    [text],
    trainers.BpeTrainer(
      vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    ),
  )
  if adds_bos:
    tokenizer.post_processor = processors.TemplateProcessing(
      single='<s> $A', pair='<s> $A <s> $B', special_tokens=[('<s>', 0)]
    )
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  stated = dict(
    tokenizer_class='PreTrainedTokenizerFast', eos_token='</s>', chat_template=template
  ) | (dict(bos_token='<s>') if names_bos else {})
  (folder / 'tokenizer_config.json').write_text(json.dumps(stated))


def chats(rng: random.Random, words: list[str]) -> list[tuple[list[dict], bool]]:
  """Returns conversations, and whether an answer begins after each."""
  text = lambda: ' '.join(rng.choices(words, k=rng.randint(1, 6)))
  user = lambda: {'role': 'user', 'content': text()}
  answer = lambda: {'role': 'assistant', 'content': text() + rng.choice(['', ' '])}
  return [
    ([user()], True), ([user(), answer(), user()], True),
    ([{'role': 'system', 'content': text()}, user()], True), ([user(), answer()], False),
  ]  # fmt: skip


def requests(
  rng: random.Random, words: list[str], rendered: list[str], count: int
) -> list[tuple[str, tuple[Any, ...]]]:
  """Returns requests of all kinds, some of them twice: their type and their arguments."""

  def context() -> str:
    kind = rng.randrange(8)
    text = ' '.join(rng.choices(words, k=rng.randint(1, 12)))
    if kind == 0:
      return ''
    if kind == 1:
      return rng.choice(rendered)
    if kind == 2:  # longer than the model takes
      return ' '.join(rng.choices(words, k=rng.randint(60, 90)))
    if kind == 3:
      return '<s>' + text
    return text + rng.choice(['', '', ' ', '  ', '\n', '\n\n', ' é', '\t'])

  def continuation() -> str:
    text = ' '.join(rng.choices(words, k=rng.randint(1, 5)))
    return rng.choice(['', ' ', ' ', '\n']) + text + rng.choice(['', '', ' ', ' ß', '.'])

  found: list[tuple[str, tuple[Any, ...]]] = []
  for number in range(count):
    kind = number % 5
    if kind == 4 and found:
      found.append(rng.choice(found))
    elif kind == 3:
      arguments = dict(
        until=rng.choice([[], ['e'], ['\n\n', 'th'], 'a', ['<|stop|>', '.'], ['o', 'ao']]),
        **rng.choice([dict(max_gen_toks=rng.randint(1, 12)), dict(max_new_tokens=9)]),
        **rng.choice([{}, dict(do_sample=False), dict(temperature=0.0, do_sample=False)]),
      )
      found.append(('generate_until', (context() or 'a', arguments)))
    elif kind == 2:
      text = ' '.join(rng.choices(words, k=rng.choice([1, 7, 40, 80])))
      found.append(('loglikelihood_rolling', (rng.choice(['', '<s>']) + text,)))
    else:
      found.append(('loglikelihood', (context(), continuation())))
  return found
