"""Tokenizer files from others give right results or one clear error."""

import json
import pathlib

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged, tokenizer_files
from paxlite.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, open_tokenizer

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


def folder_of_pieces(folder, **files) -> str:
  """Writes the packaged model as tokenizer.model, and JSON files next to it."""
  (folder / 'tokenizer.model').write_bytes(pathlib.Path(packaged.VOCAB).read_bytes())
  for name, contents in files.items():
    (folder / f'{name}.json').write_text(json.dumps(contents))
  return str(folder)


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    (dict(added_tokens={'<more>': 8192}), 'added_tokens.json changes the ids of tokenizer.model'),
    (dict(tokenizer_config={'add_bos_token': True}), 'add_bos_token changes the ids'),
    (dict(tokenizer_config={'tokenizer_class': 'T5TokenizerFast'}), 'the class T5Tokenizer of'),
    (dict(tokenizer_config={'tokenizer_class': 'Qwen2Tokenizer'}), 'Qwen2Tokenizer reads no'),
    (dict(tokenizer_config={'tokenizer_class': 'LlamaTokenizer', 'added_tokens_decoder': {'x': 1}}),
     "added_tokens_decoder has no token for 'x'"),
  ],
)  # fmt: skip
def test_a_folder_of_pieces_that_is_refused(tmp_path, files, message):
  with pytest.raises(UserError, match=message):
    open_tokenizer(folder_of_pieces(tmp_path, **files))


def test_who_reads_a_folder_of_pieces(tmp_path):
  found = open_tokenizer(folder_of_pieces(tmp_path))
  assert isinstance(found, SentencePieceTokenizer)
  assert found.eos_id == 2
  names = {'eos_token': '<s>', 'padding_side': 'left'}
  assert open_tokenizer(folder_of_pieces(tmp_path, tokenizer_config=names)).eos_id == 1
  of_class = {'tokenizer_class': 'LlamaTokenizer', 'add_bos_token': True}
  found = open_tokenizer(folder_of_pieces(tmp_path, tokenizer_config=of_class))
  assert isinstance(found, JsonTokenizer)
  assert found.start_ids == [1]


def test_keys_that_nobody_reads_are_said_once(tmp_path, caplog):
  known = {'tokenizer_class': 'LlamaTokenizer', 'model_max_length': 8, 'image_token': '<i>'}
  path = folder_of_pieces(tmp_path, tokenizer_config=known | {'sp_model_kwargs': {}})
  open_tokenizer(path)
  assert not caplog.records
  folder_of_pieces(tmp_path, tokenizer_config=known | {'do_lower_case': True})
  for _ in range(2):
    open_tokenizer(path)
  (record,) = caplog.records
  assert 'tokenizer_config.json: do_lower_case: not read' in record.message


@pytest.mark.cases(fast=6)
@pytest.mark.parametrize('value', [0, 7.5, True, 'text', [], ['a', 3, {}], {}, {'a': {}, '1': 'b'}])
@pytest.mark.parametrize('of_pieces', [False, True])
def test_values_of_a_wrong_kind_are_ignored_or_refused(tmp_path, value, of_pieces):
  """Nothing but UserError comes of them."""
  if of_pieces:
    path = folder_of_pieces(tmp_path)
  else:
    path = str(pathlib.Path(written(tmp_path, bpe())).parent)
  stated = {'tokenizer_class': 'LlamaTokenizer'}
  keys = [*tokenizer_files.READ, 'bos_token', 'eos_token', 'image_token']
  files = [(key, dict(tokenizer_config=stated | {key: value})) for key in keys]
  files += [
    ('added_tokens', dict(tokenizer_config=stated, added_tokens={'a': value})),
    ('map', dict(tokenizer_config=stated, special_tokens_map={'extra_special_tokens': value})),
    ('map', dict(tokenizer_config=stated, special_tokens_map={'additional_special_tokens': value})),
  ]
  for key, contents in files:
    for name, content in contents.items():
      (tmp_path / f'{name}.json').write_text(json.dumps(content))
    try:
      tokenizer = open_tokenizer(path)
      assert isinstance(tokenizer.encode('ab'), list), key
      assert isinstance(tokenizer.start_ids, list), key
    except UserError:
      pass
    for name in contents:
      (tmp_path / f'{name}.json').unlink()
