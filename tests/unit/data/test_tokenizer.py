"""Tokenizer files from others give right results or one clear error."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import JsonTokenizer, open_tokenizer

tokenizers = pytest.importorskip('tokenizers')


def bpe() -> dict:
  """Returns a tokenizer.json with three tokens and <s>, which starts a text."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0, 'b': 1, 'ab': 2}, [('a', 'b')]))
  made.add_special_tokens(['<s>'])
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 3)]
  )
  return json.loads(made.to_str())


def written(folder, tree) -> str:
  path = folder / 'tokenizer.json'
  path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
  return str(path)


@pytest.mark.parametrize(
  ('where', 'value'),
  [
    (('model', 'continuing_subword_prefix'), '##'),
    (('model', 'merges'), [['a', '<s>']]),
    (('model', 'vocab'), 3),
    (('added_tokens',), 3),
  ],
)
def test_a_tokenizer_that_cannot_be_opened(tmp_path, where, value):
  """The first two cause panics of the Rust library, which are not Exceptions."""
  tree = bpe()
  inner = tree
  for key in where[:-1]:
    inner = inner[key]
  inner[where[-1]] = value
  path = written(tmp_path, tree)
  with pytest.raises(UserError, match=rf'the tokenizer {path} is not a tokenizer\.json'):
    open_tokenizer(path)


@pytest.mark.parametrize(
  'single',
  [
    [{'Sequence': {'id': 'A', 'type_id': 0}}, {'SpecialToken': {'id': 'gone', 'type_id': 0}}],
    [{'Sequence': {'id': 'B', 'type_id': 1}}],
  ],
)
def test_a_tokenizer_that_panics_later(tmp_path, single):
  tree = bpe()
  tree['post_processor']['single'] = single
  tokenizer = JsonTokenizer(written(tmp_path, tree))
  with pytest.raises(UserError, match=rf'the tokenizer {tokenizer.path} cannot encode a text'):
    print(tokenizer.bos_id)


def test_texts_and_ids_that_a_tokenizer_does_not_know(tmp_path):
  tree = bpe() | {'model': {'type': 'WordPiece', 'vocab': {'a': 0}, 'unk_token': '[UNK]'}}
  tree['model'] |= {'continuing_subword_prefix': '##', 'max_input_chars_per_word': 100}
  tokenizer = JsonTokenizer(written(tmp_path, tree))
  for encode in (tokenizer.encode, tokenizer.encode_array, tokenizer.encode_tokens):
    with pytest.raises(UserError, match=r'cannot encode a text \(WordPiece error: Missing \[UNK\]'):
      encode('b')
  for ids in ([-1], [2**40]):
    with pytest.raises(UserError, match='cannot decode ids'):
      tokenizer.decode(ids)


def test_a_text_is_neither_cut_off_nor_padded(tmp_path):
  """This holds for all settings in the file, as in transformers without an explicit request."""
  tree = bpe()
  tree['truncation'] = {'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0}
  tree['truncation'] |= {'direction': 'Right'}
  tree['padding'] = {'strategy': {'Fixed': 1 << 20}, 'direction': 'Right', 'pad_id': 0}
  tree['padding'] |= {'pad_to_multiple_of': None, 'pad_type_id': 0, 'pad_token': 'a'}
  tokenizer = JsonTokenizer(written(tmp_path, tree))
  assert tokenizer.encode('ababb') == [2, 2, 1]
  assert tokenizer.encode_array('ababb').tolist() == [2, 2, 1]
  assert tokenizer.bos_id == 3
