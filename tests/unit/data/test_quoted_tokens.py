"""Special tokens in the messages of others are text, and those of the template stay special."""

import random

import pytest

from paxlite.core.foreign_text import printable
from paxlite.data import packaged
from paxlite.data.text_encoding import TextEncoding
from paxlite.data.tokenizer import open_tokenizer

WORDS = ['Hello', ' there', '\n', ' ', 'x', '<|im', 'end|>']


@pytest.fixture(scope='module', params=['json', 'sentencepiece'])
def encoding(request, tmp_path_factory):
  """An encoding, and the texts of the special tokens around its messages."""
  if request.param == 'sentencepiece':
    tokenizer, marks = open_tokenizer(packaged.VOCAB), ('<s>', '</s>')
  else:
    import tokenizers

    marks = '<|im_start|>', '<|im_end|>'
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=[*marks]
    )
    made.train_from_iterator(['Hello there'] * 3, trainer)
    path = tmp_path_factory.mktemp('json') / 'tokenizer.json'
    made.save(str(path))
    tokenizer = open_tokenizer(str(path))
  begin, end = marks
  template = (
    f'{{% for m in messages %}}{begin}{{{{ m.role }}}}\n{{{{ m.content | trim }}}}{end}\n'
    f'{{% endfor %}}{begin}assistant\n'
  )
  return TextEncoding(tokenizer, chat_template=template), marks


@pytest.mark.parametrize('seed', range(8))
def test_special_tokens_in_messages_are_text(encoding, seed):
  encoding, marks = encoding
  draw = random.Random(seed)
  text = lambda extra: ''.join(draw.choices([*WORDS, *extra], k=draw.randint(1, 12))) + 'y'
  roles = ['system', 'user', 'assistant', 'user'][draw.randint(0, 1) :]
  messages = [{'role': role, 'content': text(marks)} for role in roles]
  ids = encoding.chat_prompt(messages, special=False)
  special = encoding.tokenizer.special_ids
  count = sum(i in special for i in ids)
  assert count == 2 * len(messages) + 1
  assert encoding.tokenizer.decode_marked(ids).split() == encoding.chat_text(messages, True).split()
  without = [m | {'content': m['content'].replace(marks[0], '').replace(marks[1], '') or 'x'}
             for m in messages]  # fmt: skip
  assert encoding.chat_prompt(without, special=False) == encoding.chat_prompt(without)


def test_tools_and_calls_cannot_write_special_tokens(encoding):
  encoding, marks = encoding
  template = f'{marks[0]}{{{{ messages[0].content }}}}{{{{ tools | tojson }}}}{marks[1]}'
  other = TextEncoding(encoding.tokenizer, chat_template=template)
  tools = [{'type': 'function', 'function': {'name': 'f', 'description': marks[1] * 3}}]
  ids = other.chat_prompt([{'role': 'user', 'content': marks[0]}], tools, special=False)
  assert [i in encoding.tokenizer.special_ids for i in ids].count(True) == 2


def test_texts_of_others_cannot_change_a_terminal():
  every = ''.join(map(chr, range(0x3000)))
  shown = printable(every)
  assert '\n' in shown
  assert '\t' in shown
  assert not any(c < ' ' or '\x7f' <= c < '\xa0' for c in shown if c not in '\n\t')
  assert printable('\x1b[31mred\x07 \u202eabc é 👩\u200d🔬\r\n') == (
    '\\x1b[31mred\\x07 \\u202eabc é 👩\u200d🔬\n'
  )
