"""GGUF files: fields that are read, harmless or refused, parts, tokenizers, and damage."""

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import open_tokenizer
from paxlite.weights import gguf_tokenizer
from paxlite.weights.gguf_file import GgufTensors
from paxlite.weights.gguf_keys import read_file
from paxlite.weights.tensor_names import GGUF

gguf = pytest.importorskip('gguf')

FIELDS = {
  'llama.block_count': 1, 'llama.context_length': 64, 'llama.embedding_length': 8,
  'llama.feed_forward_length': 12, 'llama.attention.head_count': 2,
  'llama.attention.layer_norm_rms_epsilon': 1e-5,
}  # fmt: skip
SHAPES = {
  'embedding': (32, 8), 'head': (32, 8), 'final_norm': (8,), 'attention_norm': (8,),
  'ffn_norm': (8,), 'gate': (12, 8), 'up': (12, 8), 'down': (8, 12),
}  # fmt: skip
TENSORS = {
  name.format(i=0): np.full(SHAPES.get(role, (8, 8)), i, np.float32)
  for i, (role, name) in enumerate(GGUF.items())
}


def write(path, fields: Mapping[str, Any] = FIELDS, tensors: Mapping[str, np.ndarray] = TENSORS):
  writer, kinds = gguf.GGUFWriter(None, 'llama'), gguf.GGUFValueType
  for name, value in fields.items():
    kind = kinds.get_type(value)
    writer.add_key_value(name, value, kinds.INT64 if kind == kinds.INT32 else kind)
  for name, tensor in tensors.items():
    writer.add_tensor(name, tensor)
  writer.write_header_to_file(path)
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({}, dict(ROPE_FACTOR=1.0, EOS_IDS=[])),
    ({'llama.rope.scaling.factor': 4.0}, dict(ROPE_FACTOR=4.0, ROPE_SCALING='linear')),
    ({'llama.rope.scale_linear': 4.0}, dict(ROPE_FACTOR=4.0, ROPE_SCALING='linear')),
    (
      {'llama.rope.scaling.type': 'yarn', 'llama.rope.scaling.factor': 4.0},
      dict(ROPE_FACTOR=4.0, ROPE_SCALING='yarn', ROPE_ORIGINAL_LENGTH=64),
    ),
    ({'llama.rope.dimension_count': 4, 'llama.attention.value_length': 4}, {}),
    ({'llama.attention.scale': 0.5, 'llama.attention.causal': True}, {}),
    ({'llama.attention.sliding_window': 64, 'llama.logit_scale': 1.0}, {}),
    ({'general.name': 'm', 'general.base_model.0.repo_url': 'u', 'quantize.imatrix.file': 'f'}, {}),
    (
      {f'tokenizer.ggml.{n}_token_id': i for n, i in (('eot', 3), ('eos', 2), ('eom', 3))},
      dict(EOS_IDS=[2, 3]),
    ),
  ],
)
def test_fields_that_are_read_or_change_nothing(tmp_path, changes, expected):
  experiment, _, _ = read_file(write(tmp_path / 'm.gguf', FIELDS | changes))
  assert {name: getattr(experiment, name) for name in expected} == expected


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'llama.rope.dimension_count': 2}, 'rope.dimension_count=2 .* width of a head is 4'),
    ({'llama.attention.value_length': 2}, 'value_length=2'),
    ({'llama.attention.sliding_window': 16}, 'sliding_window=16 is not implemented'),
    ({'llama.attention.scale': 0.1}, 'attention.scale=0.1'),
    ({'llama.attention.causal': False}, 'attention.causal=False is not implemented'),
    ({'llama.logit_scale': 0.25}, 'logit_scale=0.25'),
    ({'llama.embedding_scale': 12.0}, 'embedding_scale=12.0'),
    ({'llama.residual_scale': 0.5}, 'residual_scale=0.5'),
    ({'llama.expert_count': 8}, 'expert_count=8'),
    ({'llama.attn_logit_softcapping': 50.0}, 'softcapping=50.0'),
    ({'llama.rope.freq_base_swa': 1e4}, 'freq_base_swa=.* may change'),
    ({'llama.tomorrow': 1}, 'llama.tomorrow=1 is not implemented: it may change'),
    ({'general.tomorrow': 1}, 'general.tomorrow=1'),
    ({'llama.vocab_size': 33}, 'vocab_size=33 .* rows of token_embd.weight is 32'),
    ({'llama.rope.scaling.type': 'longrope'}, "type='longrope'"),
    ({'llama.rope.scaling.type': 'none', 'llama.rope.scaling.factor': 4.0}, "type='none' with a"),
    (
      {'llama.rope.scaling.factor': 4.0, 'llama.rope.scale_linear': 2.0},
      'rope.scale_linear disagree',
    ),
    (
      {'llama.rope.scaling.original_context_length': 32},
      'original_context_length has no effect with rope.scaling.type linear',
    ),
    ({'general.type': 'adapter'}, "general.type='adapter'.*: merge it"),
    ({'llama.block_count': 4_000_000_000}, 'block_count=4000000000 must be from 0 to 2,000'),
    ({'llama.block_count': 1.0}, 'block_count=1.0 must be an integer'),
    ({'llama.attention.head_count': [2, 2]}, r'head_count must be a number, not \[2, 2\]'),
  ],
)
def test_fields_that_are_refused(tmp_path, changes, match):
  with pytest.raises(UserError, match=match):
    read_file(write(tmp_path / 'm.gguf', FIELDS | changes))


def parts(tmp_path, changes: Mapping[str, Any] = {}, both: tuple[str, ...] = ()):
  """Writes a model in two files; only the first has the fields of the model."""
  names = list(TENSORS)
  halves = names[:5], [*both, *names[5:]]
  for i, half in enumerate(halves):
    kept = {name: TENSORS[name] for name in half}
    fields = {'split.no': i, 'split.count': 2, 'split.tensors.count': len(TENSORS)}
    fields |= changes if i else FIELDS
    write(tmp_path / f'm-0000{i + 1}-of-00002.gguf', fields, kept)
  return tmp_path


def test_all_parts_of_a_split_model_are_read(tmp_path):
  folder = parts(tmp_path)
  for path in (folder, *sorted(folder.iterdir())):
    _, entries, tensors = read_file(path)
    assert {e.theirs for e in entries} == tensors.shapes.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
      np.testing.assert_array_equal(tensors.read(name), expected)


def test_parts_that_do_not_belong_together(tmp_path):
  folder = parts(tmp_path, both=('token_embd.weight',))
  with pytest.raises(UserError, match=r'token_embd.weight is in a part before it, too'):
    read_file(folder)
  folder = parts(tmp_path, {'llama.context_length': 65})
  with pytest.raises(UserError, match='context_length=65 is not that of the parts before'):
    read_file(folder)
  folder = parts(tmp_path, {'split.tensors.count': 99})
  with pytest.raises(UserError, match=r'split.tensors.count=99 is not that'):
    read_file(folder)
  (folder / 'm-00002-of-00002.gguf').unlink()
  with pytest.raises(UserError, match=r'm-00002-of-00002.gguf is missing: the model has 2 parts'):
    read_file(folder)
  (folder / 'm-00001-of-00002.gguf').rename(folder / 'm.gguf')
  with pytest.raises(UserError, match='its name must say so'):
    read_file(folder)


def vocabulary() -> dict[str, Any]:
  """Returns the fields of a tokenizer as llama.cpp's converter writes them of a Llama 3."""
  tokenizers = pytest.importorskip('tokenizers')
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = [*letters, 'to', '[PAD]', '<|begin|>', '<|end|>', '<tool>']
  return {
    'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'llama-bpe',
    'tokenizer.ggml.tokens': tokens, 'tokenizer.ggml.merges': ['t o'],
    'tokenizer.ggml.token_type': [1] * (len(letters) + 1) + [5, 3, 3, 4],
    'tokenizer.ggml.bos_token_id': len(tokens) - 3, 'tokenizer.ggml.eos_token_id': len(tokens) - 2,
  }  # fmt: skip


@pytest.mark.parametrize('add_bos', [None, True, False])
@pytest.mark.parametrize('add_eos', [None, True, False])
def test_a_tokenizer_is_the_one_that_the_file_was_made_of(tmp_path, add_bos, add_eos):
  """The original is written as transformers saves one, with special and other added tokens."""
  from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

  fields = vocabulary()
  fields |= {} if add_bos is None else {'tokenizer.ggml.add_bos_token': add_bos}
  fields |= {} if add_eos is None else {'tokenizer.ggml.add_eos_token': add_eos}
  assert gguf_tokenizer.write_tokenizer(fields, tmp_path, len(fields['tokenizer.ggml.tokens']))
  ours = Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  tokens = fields['tokenizer.ggml.tokens']
  ids = {token: i for i, token in enumerate(tokens)}
  model = {t: i for t, i in ids.items() if t not in ('[PAD]', '<|begin|>', '<|end|>', '<tool>')}
  original = Tokenizer(models.BPE(model, [('t', 'o')], ignore_merges=True))
  split = pre_tokenizers.Split(Regex(gguf_tokenizer._SPLIT), 'isolated')
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  original.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
  original.add_tokens([AddedToken('[hole]', special=True)])  # at the id of the unused token
  original.add_special_tokens(['<|begin|>', '<|end|>'])
  original.add_tokens([AddedToken('<tool>', normalized=False)])
  begins, ends = add_bos in (None, True), add_eos is True
  frame = ['<|begin|>'] * begins + ['$A'] + ['<|end|>'] * ends
  used = [(t, ids[t]) for t in frame if t != '$A']
  original.post_processor = processors.TemplateProcessing(' '.join(frame), special_tokens=used)
  for text in ('', 'to go', '<tool>to</tool>', '<|begin|>x<|end|>', '[PAD]'):
    assert ours.encode(text).ids == original.encode(text).ids, text
  opened = open_tokenizer(str(tmp_path))
  assert opened.eos_id == ids['<|end|>']
  assert opened.decode([ids['<tool>'], ids['to']]) == '<tool>to'


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'tokenizer.ggml.add_space_prefix': True}, 'add_space_prefix=True is not implemented'),
    ({'tokenizer.ggml.precompiled_charsmap': [1]}, 'precompiled_charsmap=.* may change'),
    ({'tokenizer.ggml.add_bos_token': 1}, 'add_bos_token must be true or false'),
    ({'tokenizer.ggml.eos_token_id': 10**6}, 'eos_token_id is none of'),
    ({'tokenizer.ggml.token_type': [9] * 261}, 'token_type 9 is not implemented'),
    ({'tokenizer.ggml.token_type': [1]}, '261 tokens and 1 of token_type'),
    ({'tokenizer.ggml.tokens': ['a'] * 261}, "the token 'a' is there twice"),
    ({'tokenizer.chat_template.tool': 3}, 'chat_template.tool must be a string'),
  ],
)
def test_tokenizers_that_are_refused(tmp_path, changes, match):
  with pytest.raises(UserError, match=match):
    gguf_tokenizer.write_tokenizer(vocabulary() | changes, tmp_path)
  with pytest.raises(UserError, match='it has 261 tokens, and the model has 300 ids'):
    gguf_tokenizer.write_tokenizer(vocabulary(), tmp_path, 300)


def test_chat_templates_keep_their_names(tmp_path):
  fields = vocabulary() | {'tokenizer.chat_template': 'a', 'tokenizer.chat_template.tool': 'b'}
  gguf_tokenizer.write_tokenizer(fields, tmp_path)
  found = json.loads((tmp_path / 'tokenizer_config.json').read_text())['chat_template']
  assert found == [{'name': 'default', 'template': 'a'}, {'name': 'tool', 'template': 'b'}]


def header(*counts: int, version: int = 3, order: str = '<') -> bytes:
  return b'GGUF' + struct.pack(f'{order}IQQ', version, *counts)


@pytest.mark.parametrize('count', [6, 9, 1 << 40])
def test_an_array_that_claims_more_than_there_is(tmp_path, count):
  """Five numbers of 32 bits are there."""
  text = lambda name: struct.pack('<Q', len(name)) + name
  array = text(b'a.numbers') + struct.pack('<IIQ', 9, 4, count) + struct.pack('<5I', *range(5))
  path = tmp_path / 'model.gguf'
  path.write_bytes(header(0, 1) + array)
  with pytest.raises(UserError, match=r'is not a GGUF file, or is cut short \(it ends too early'):
    GgufTensors(path)


@pytest.mark.parametrize(
  ('content', 'match'),
  [
    (header(0, 0, order='>'), 'its byte order is big-endian'),
    (header(1 << 62, 0), 'it ends too early'),
    (header(0, 1 << 62), 'it ends too early'),
    (header(0, 0, version=1), 'version 1 is not implemented'),
    (b'GGU', 'it ends too early'),
    (header(0, 1) + struct.pack('<QcI', 1, b'a', 7), 'it ends too early'),  # before a truth value
    (header(0, 1) + struct.pack('<QcIB', 1, b'a', 7, 2), 'neither 0 nor 1'),
    (b'', 'it is empty'),
  ],
)
def test_headers_that_are_not_good(tmp_path, content, match):
  path = tmp_path / 'm.gguf'
  path.write_bytes(content)
  with pytest.raises(UserError, match=match):
    GgufTensors(path)


def test_a_list_of_a_huge_file_is_refused_before_it_is_read(tmp_path):
  path = tmp_path / 'm.gguf'
  path.write_bytes(header(0, 1) + struct.pack('<Q', 1) + b'a' + struct.pack('<IIQ', 9, 8, 1 << 30))
  os.truncate(path, 1 << 40)  # a sparse file
  with pytest.raises(UserError, match='elements of a list are more than'):
    GgufTensors(path)


def test_a_fifo_is_refused_at_once(tmp_path):
  os.mkfifo(tmp_path / 'm.gguf')
  with pytest.raises(UserError, match='it is a FIFO'):
    read_file(tmp_path / 'm.gguf')


def test_a_type_that_the_package_does_not_decode_is_named(tmp_path):
  path = tmp_path / 'a.gguf'
  writer = gguf.GGUFWriter(str(path), 'llama')
  blocks = np.zeros((2, 292), np.uint8)  # of 256 numbers each
  writer.add_tensor('blk.0.w', blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_K)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(UserError, match=r'a.gguf: blk.0.w cannot be read: .*Q8_K'):
    GgufTensors(path).read('blk.0.w')
