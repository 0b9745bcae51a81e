"""Contexts and continuations are split, and texts end, as EleutherAI's harness has it."""

import json

import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.core.errors import UserError
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval.contexts import Contexts
from paxlite.generation.text import AnswerText

pytest.importorskip('tokenizers')


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """One token for each byte, and the special tokens 256 to 258; BOS is added by the tokenizer."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

  folder = tmp_path_factory.mktemp('tokenizer')
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  made = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
  made.add_special_tokens(['<s>', '</s>', '<|end|>'])
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  made.post_processor = processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 256)]
  )
  made.save(str(folder / 'tokenizer.json'))
  named = dict(bos_token='<s>', eos_token='</s>')
  (folder / 'tokenizer_config.json').write_text(json.dumps(named))
  return open_tokenizer(str(folder))


@pytest.mark.parametrize(
  ('context', 'continuation', 'before', 'after'),
  [
    ('a', ' b', '<s>a', ' b'),
    ('a ', 'b', '<s>a', ' b'),
    ('a \n', 'b', '<s>a', ' \nb'),
    ('', 'b', '<s>', 'b'),
    ('', '<s>b', '<s>', 'b'),
    ('  ', 'b', '<s>', '  b'),
    ('<s>a', 'b', '<s>a', 'b'),
  ],
)
def test_pairs(tokenizer, context, continuation, before, after):
  found = Contexts(ChatEncoding(tokenizer), [256], 256).pair(context, None, continuation)
  assert tokenizer.decode_marked(found.context) == before
  assert tokenizer.decode_marked(found.continuation) == after


def test_a_text_that_a_template_wrote_gets_no_start(tokenizer):
  contexts = Contexts(ChatEncoding(tokenizer), [256], 256)
  assert tokenizer.decode_marked(contexts.pair('<|end|>a', False, 'b').context) == '<|end|>a'
  assert contexts.encode('<s>a').count(256) == 1


def test_what_cannot_be_scored_is_refused(tokenizer):
  with pytest.raises(UserError, match='adds no token'):
    Contexts(ChatEncoding(tokenizer), [256], 256).pair('', None, '')
  with pytest.raises(UserError, match='neither BOS nor EOS'):
    Contexts(ChatEncoding(tokenizer), [], None).pair('', None, 'b')


@pytest.mark.parametrize(
  ('until', 'text'),
  [
    ([], 'one twothree'),
    (['two', ' '], 'one'),
    (['<|end|>'], 'one two'),
    (['e'], 'on'),
    (['three', 'zzz'], 'one two'),
  ],
)
def test_a_text_ends_at_the_first_ending_even_if_that_is_a_token(tokenizer, until, text):
  ids = ChatEncoding(tokenizer).marked('one two<|end|>three')
  answer = AnswerText(tokenizer, until)
  for i in ids:
    if not answer.is_ended:
      answer.add(i)
  assert answer.text == text
