"""Fingerprints of tokenizers: runs go on where texts have the ids that they had, and only there."""

import json
import pathlib
import shutil

import pytest

from paxlite.data import packaged
from paxlite.data.document_encoding import DocumentEncoding
from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
from paxlite.tokenization.commands import tokenize

ADDED = {'<s>': 3, '</s>': 4, '<fim>': 5}
FLAGS = {'lstrip': False, 'rstrip': False, 'single_word': False, 'normalized': False}
TOKENS = [{'id': i, 'content': t, 'special': True} | FLAGS for t, i in ADDED.items()]
BEGINS = {
  'type': 'TemplateProcessing', 'pair': [],
  'single': [
    {'SpecialToken': {'id': '<s>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}},
  ],
  'special_tokens': {'<s>': {'id': '<s>', 'ids': [3], 'tokens': ['<s>']}},
}  # fmt: skip
LETTERS = {
  'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': TOKENS,
  'normalizer': None, 'pre_tokenizer': None, 'post_processor': BEGINS, 'decoder': None,
  'model': {
    'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
    'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
    'vocab': {'a': 0, 'b': 1, ' ': 2}, 'merges': [],
  },
}  # fmt: skip
DECODER = {str(t['id']): {k: v for k, v in t.items() if k != 'id'} for t in TOKENS}
STRIPPED = DECODER | {'5': DECODER['5'] | {'lstrip': True}}
NAMES = {'bos_token': '<s>', 'eos_token': '</s>'}

# Files next to tokenizer.json, with the fingerprint that the first version with them had.
SAME = {
  'alone': ({}, 284_100_911),
  'names': ({'tokenizer_config.json': NAMES}, 2_959_476_521),
  'decoder': ({'tokenizer_config.json': NAMES | {'added_tokens_decoder': DECODER}}, 3_002_937_131),
  'map': (
    {'special_tokens_map.json': NAMES | {'additional_special_tokens': ['<fim>']}},
    2_959_476_521,
  ),
  'added': (
    {
      'added_tokens.json': {'<fim>': 5},
      'tokenizer_config.json': NAMES | {'additional_special_tokens': ['<fim>']},
    },
    4_200_290_861,
  ),
  'object': (
    {'tokenizer_config.json': NAMES | {'extra_special_tokens': {'fim': '<fim>'}}},
    1_607_741_137,
  ),
}
# The same, with other ids than that version's.
OTHER = {
  'flags': ({'tokenizer_config.json': NAMES | {'added_tokens_decoder': STRIPPED}}, 3_349_420_399),
  'map': (
    {'special_tokens_map.json': NAMES | {'additional_special_tokens': ['ab']}},
    2_959_476_521,
  ),
}


def folder(path: pathlib.Path, files: dict) -> str:
  for name, contents in ({'tokenizer.json': LETTERS} | files).items():
    (path / name).write_text(json.dumps(contents))
  return str(path)


def fingerprint(path: str) -> int:
  return DocumentEncoding(open_tokenizer(path)).fingerprint


@pytest.mark.parametrize('name', SAME)
def test_the_fingerprint_of_an_earlier_version_stays_where_ids_do(name, tmp_path):
  files, former = SAME[name]
  assert fingerprint(folder(tmp_path, files)) == former


@pytest.mark.parametrize('name', OTHER)
def test_the_fingerprint_changes_where_ids_have_changed(name, tmp_path):
  files, former = OTHER[name]
  assert fingerprint(folder(tmp_path, files)) != former


@pytest.mark.parametrize(
  ('files', 'former', 'stays'), [({}, 3_492_619_439, True), (NAMES, 3_141_232_210, False)]
)
def test_a_model_has_another_fingerprint_if_a_class_reads_it(files, former, stays, tmp_path):
  shutil.copyfile(packaged.VOCAB, tmp_path / 'tokenizer.model')
  if files:
    files = files | {'tokenizer_class': 'LlamaTokenizer', 'add_bos_token': True}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(files))
  assert (fingerprint(str(tmp_path)) == former) is stays


@pytest.mark.parametrize('kind', ['LlamaTokenizer', 'PreTrainedTokenizerFast'])
def test_the_same_pieces_are_the_same_vocabulary_whoever_reads_them(kind, tmp_path):
  shutil.copyfile(packaged.VOCAB, tmp_path / 'tokenizer.model')
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'tokenizer_class': kind}))
  found = [open_tokenizer(path) for path in (packaged.VOCAB, str(tmp_path))]
  assert type(found[0]) is not type(found[1])
  assert vocabulary_fingerprint(found[0]) == vocabulary_fingerprint(found[1])


@pytest.mark.parametrize('name', ['decoder', 'flags'])
def test_an_unfinished_tokenization_is_resumed_where_ids_stay(name, monkeypatch, tmp_path):
  seen = []
  monkeypatch.setattr(
    tokenize, '_write', lambda args, path, sources, settings, _: seen.append(settings)
  )
  vocab = folder(tmp_path, (SAME | OTHER)[name][0])
  (tmp_path / 'a.txt').write_text('ab')
  tokenize.main([f'{tmp_path}/a.txt', f'--vocab={vocab}', f'--output={tmp_path}/out'])
  assert (seen[0]['tokenizer_files'] is None) is (name in SAME)
