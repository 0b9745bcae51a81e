"""The fields of a GGUF file that say what begins and ends a text."""

import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.weights.gguf_tokenizer_writer import _special
from tests.unit.generation.test_spelling import made

pytest.importorskip('tokenizers')
CHAT = '{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}'
CALLS = (
  '{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}</think>'
  '{% endfor %}{% if not m.tool_calls %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}'
)


@pytest.mark.parametrize(
  ('template', 'ends', 'expected'),
  [
    ('', [], ['</s>']),
    (CHAT, [], ['</s>', '<|im_end|>']),
    (CALLS, [], ['</s>', '<|im_end|>', '</think>']),
    # as in Llama 3, whose config lists the end of a message before that of a turn
    (CALLS, ['</s>', '</think>', '<|im_end|>'], ['</s>', '<|im_end|>', '</think>']),
    (CHAT, ['<|im_end|>', '</s>'], ['<|im_end|>', '</s>']),
  ],
)
def test_the_ends_of_texts_answers_and_calls(tmp_path, template, ends, expected):
  tokenizer = made('byte_level', tmp_path)
  ids = {tokenizer.piece(i): i for i in sorted(tokenizer.special_ids)}
  encoding = ChatEncoding(tokenizer, eos_ids=[ids[e] for e in ends], chat_template=template)
  fields = _special(encoding, tokenizer, [tokenizer.piece(i) for i in range(tokenizer.vocab_size)])
  names = [f'tokenizer.ggml.{name}_token_id' for name in ('eos', 'eot', 'eom')]
  assert [fields[name] for name in names if name in fields] == [ids[e] for e in expected]
