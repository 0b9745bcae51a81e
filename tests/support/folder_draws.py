"""Draws folders of tokenizers as Hugging Face publishes them, all of whose files count."""

import functools
import io
import json
import pathlib
import random
from typing import Any

import sentencepiece

from tests.support.tokenizer_draws import LEARNED_FROM, MARKS

_ADDED = [*MARKS, '<tool>', 'foo_bar', '\n\n', '<image>']
_FLAGS = ('lstrip', 'rstrip', 'single_word', 'normalized')


@functools.cache
def model(kind: str, byte_fallback: bool, prefix: bool, cleans: bool, defines: bool) -> bytes:
  """Returns a SentencePiece model."""
  made = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter([line for text in LEARNED_FROM for line in text.split('\n') if line]),
    model_writer=made, vocab_size=420, hard_vocab_limit=False, model_type=kind,
    byte_fallback=byte_fallback, add_dummy_prefix=prefix, remove_extra_whitespaces=cleans,
    normalization_rule_name='nmt_nfkc' if cleans else 'identity', minloglevel=2,
    control_symbols=['<ctrl>'] if defines else [],
    user_defined_symbols=['<tool>', 'user'] if defines else [],
  )  # fmt: skip
  return made.getvalue()


def draw_folder(rng: random.Random, folder: pathlib.Path) -> dict[str, Any]:
  """Writes the files of a tokenizer without tokenizer.json; returns what was drawn."""
  drawn: dict[str, Any] = {}

  def pick(name: str, *choices: Any) -> Any:
    drawn[name] = rng.choice(choices)
    return drawn[name]

  name = pick('class', 'LlamaTokenizer', 'LlamaTokenizer', 'LlamaTokenizerFast', 'GemmaTokenizer',
              'PreTrainedTokenizerFast')  # fmt: skip
  kind = pick('kind', 'bpe', 'bpe', 'unigram') if 'Llama' not in name else 'bpe'
  drawn['kind'] = kind
  content = model(
    kind, pick('bytes', True, True, False), pick('prefix', True, False),
    pick('cleans', False, False, True), pick('defines', False, True),
  )  # fmt: skip
  (folder / 'tokenizer.model').write_bytes(content)
  size = sentencepiece.SentencePieceProcessor(model_proto=content).GetPieceSize()
  stated: dict[str, Any] = {'tokenizer_class': name, 'model_max_length': 1000}
  names = {'bos_token': '<s>', 'eos_token': pick('eos', '</s>', '<|im_end|>'), 'unk_token': '<unk>'}
  if pick('pad', False, True):
    names['pad_token'] = pick('pad_token', '<unk>', '<pad>')
  texts = rng.sample(_ADDED, rng.randint(0, len(_ADDED)))
  drawn['added'] = texts
  token = lambda text: _token(rng, text)
  if pick('form', 'decoder', 'older') == 'decoder':
    known = {str(i): token(t) for i, t in enumerate(['<unk>', '<s>', '</s>']) if rng.random() < 0.8}
    added = {str(size + i): token(text) for i, text in enumerate(texts)}
    stated |= names | {'added_tokens_decoder': known | added}
  else:
    numbered = [(text, size + i) for i, text in enumerate(texts)]
    rng.shuffle(numbered)
    (folder / 'added_tokens.json').write_text(json.dumps(dict(numbered)))
    (folder / 'special_tokens_map.json').write_text(json.dumps(names))
    stated |= names if pick('both', False, True) else {}
  for key in ('add_bos_token', 'add_eos_token', 'add_prefix_space', 'legacy'):
    if (value := pick(key, 'absent', None, False, True)) != 'absent':
      stated[key] = value
  extra = pick('extra', None, 'extra_special_tokens', 'additional_special_tokens')
  if extra:
    stated[extra] = rng.sample([*texts, '<more>'], rng.randint(0, 1))
  if pick('split', False, False, False, True):
    stated['split_special_tokens'] = True
  (folder / 'config.json').write_text(
    json.dumps({'model_type': pick('model', 'llama', 'mistral', 'mixtral', 'phi3')})
  )
  (folder / 'tokenizer_config.json').write_text(json.dumps(stated))
  return drawn


def change_configuration(rng: random.Random, folder: pathlib.Path) -> dict[str, Any]:
  """Lets a tokenizer_config.json say other things than the tokenizer.json next to it.

  Returns what was changed, for messages.
  """
  tree = json.loads((folder / 'tokenizer.json').read_text())
  path = folder / 'tokenizer_config.json'
  stated = json.loads(path.read_text())
  if (older := folder / 'special_tokens_map.json').exists():  # which then nobody reads
    stated |= json.loads(older.read_text())
    older.unlink()
  own = [t for t in tree['added_tokens'] if not t['content'].startswith('<0x')]
  listed = {str(t['id']): t['content'] for t in own if rng.random() < 0.7}
  last = max([*tree['model']['vocab'].values()] if isinstance(tree['model']['vocab'], dict) else
             [len(tree['model']['vocab'])], default=0)  # fmt: skip
  first = max([last, *(t['id'] for t in tree['added_tokens'])]) + 1
  more = rng.sample(['<more>', 'nothing else', '<|im_end|>', 'user'], rng.randint(0, 3))
  known = {t['content'] for t in tree['added_tokens']}
  listed |= {str(first + i): t for i, t in enumerate(m for m in more if m not in known)}
  changed: dict[str, Any] = {
    'added_tokens_decoder': {i: _token(rng, text) for i, text in listed.items()}
  }
  if rng.random() < 0.5:
    changed['eos_token'] = rng.choice(['<|im_end|>', '<s>', '<end>'])
  if rng.random() < 0.5:
    changed['pad_token'] = '<pad>'
  if rng.random() < 0.5:
    changed['extra_special_tokens'] = rng.sample(['<one>', '<extra>', 'foo_bar', '<two>'], 2)
  path.write_text(json.dumps(stated | changed))
  return changed


def _token(rng: random.Random, text: str) -> dict[str, Any]:
  flags = {flag: rng.random() < 0.2 for flag in _FLAGS}
  return {'content': text, 'special': rng.random() < 0.6, **flags}
