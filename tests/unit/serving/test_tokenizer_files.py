"""A tokenizer is read when it is opened; what happens to its file later does not matter."""

import pathlib
import shutil

import pytest

from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.generation.grammar import Grammars


@pytest.mark.parametrize('kind', ['tokenizer.json', 'tokenizer.model'])
def test_a_file_that_is_replaced_changes_nothing(tmp_path, kind):
  pytest.importorskip('llguidance')
  path = tmp_path / kind
  if kind == 'tokenizer.model':
    source = pathlib.Path(packaged.VOCAB)
    shutil.copy(source if source.is_file() else source / kind, path)
  else:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=['</s>'])
    made.train_from_iterator(['Hello there'], trainer)
    made.save(str(path))
  tokenizer, same = open_tokenizer(str(path)), open_tokenizer(str(path))
  text, ends = 'a</s>b', [tokenizer.encode_tokens('</s>', marked=True).ids[0].item()]

  def used(tokenizer):
    grammar = Grammars(tokenizer, tokenizer.vocab_size, ends).json({'const': 5})
    ids = [tokenizer.encode_quoted(text, plain, ['</s>']) for plain in ([], [(1, 5)])]
    return grammar.allowed().tolist(), ids

  expected = used(same)
  assert sum(expected[0]) < 9
  path.write_text('{}')
  assert used(tokenizer) == expected
