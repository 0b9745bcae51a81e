"""What paxlite data shows of data, and what a run says of them first."""

import json
import re

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.data import data_summary, packaged
from paxlite.data.base import RowInput
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats.sft import SftRows
from paxlite.run_data import data as tool
from paxlite.run_data import data_report
from paxlite.tokenization.commands import tokenize

VOCAB = f'--vocab={packaged.VOCAB}'
EXAMPLES = [{'prompt': f'{i} times {i}?', 'completion': ' word' * (i + 1)} for i in range(20)]
LONG = {'prompt': 'a', 'completion': ' word' * 300}


def write(path, records) -> str:
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  return str(path)


def shown(capsys, *argv: str) -> dict[str, str]:
  """Returns what the tool prints, by the first word of a line; the example is under `text`."""
  tool.main(list(argv))
  out, _, text = capsys.readouterr().out.partition('\n\nExample')
  lines = [line for line in out.splitlines() if not line.startswith(' ')]
  return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines} | {'text': text, 'out': out}


def test_examples_and_what_is_learned_of_one(tmp_path, capsys):
  path = write(tmp_path / 'a.jsonl', EXAMPLES)
  found = shown(capsys, path, VOCAB, '--fdl.MAX_SEQ_LEN=64', '--fdl.PERCORE_BATCH_SIZE=2')
  source = SftRows([path], packaged.VOCAB, 64, 8192)
  weights = source.read(np.arange(len(source)))['weights']
  tokens, learned = source.lengths.sum(), int(weights.sum())
  assert found['Format'] == 'prompt and completion (20)'
  assert found['Contents'] == (
    f'20 examples, {tokens:,} tokens, {learned:,} learned ({learned / tokens:.0%})'
  )
  assert found['Rows'] == f'{len(source)} rows of 64 tokens, {tokens / weights.size:.0%} full'
  assert f'{len(source) / 2:g} steps of 2 rows' in found['Epoch']
  first = found['text'].partition('\nExample 2')[0]
  assert first == ' 1, in [[ ]] what is learned:\n<s>0 times 0?[[ word</s>]]\n'
  counts = [int(line.split()[-1]) for line in found['out'].splitlines() if line.startswith(' ')]
  assert sum(counts) == 20


def test_a_file_of_chats_alone_is_enough(tmp_path, capsys):
  """What somebody types first: no tokenizer, no experiment, no chat template."""
  call = {'type': 'function', 'function': {'name': 'where', 'arguments': {'parcel': '7'}}}
  turns = [
    {'role': 'user', 'content': 'Where is it?'}, {'role': 'assistant', 'tool_calls': [call]},
    {'role': 'tool', 'content': 'Rome'}, {'role': 'assistant', 'content': 'In Rome.'},
  ]  # fmt: skip
  path = write(tmp_path / 'a.jsonl', [{'messages': turns, 'tools': [call]}] * 5)
  found = shown(capsys, path)
  assert found['Counts'].startswith("by the demo's tokenizer")
  assert found['Format'] == 'messages (5)'
  assert 'assistant:[[ [{"type": "function"' in found['text']
  assert '\nassistant:[[ In Rome.\n]]' in found['text']


@pytest.mark.parametrize(
  ('too_long', 'expected', 'refused'),
  [('error', 'Left out', True), ('skip', 'Left out', False), ('truncate', 'Cut', False)],
)
def test_examples_that_are_too_long(tmp_path, capsys, too_long, expected, refused):
  path = write(tmp_path / 'a.jsonl', [*EXAMPLES, LONG, LONG])
  found = shown(capsys, path, VOCAB, '--fdl.MAX_SEQ_LEN=64', f'--fdl.TOO_LONG={too_long}')['out']
  assert re.search(rf'^{expected} +2 examples, too long$', found, re.MULTILINE)
  assert 'the longest: ' in found
  assert f' tokens ({path}:21)' in found
  assert ('a run refuses this data' in found) == refused


def test_what_is_held_out(tmp_path, capsys):
  path = write(tmp_path / 'a.jsonl', [*EXAMPLES, LONG])
  found = shown(capsys, path, VOCAB, '--fdl.MAX_SEQ_LEN=64', '--fdl.EVAL_FRACTION=0.1')
  assert found['Contents'].startswith('17 examples')
  assert found['Held'].startswith('out  3 examples')
  assert '3 of 20 examples are held out, 15.0% instead of 10.0% (EVAL_FRACTION)' in found['Note']


def test_an_experiment_of_fine_tuning_needs_no_weights_for_it(tmp_path, capsys):
  path = write(tmp_path / 'a.jsonl', EXAMPLES)
  tuned = '--fdl_config=HuggingFaceLoRA', '--fdl.MODEL=SmolLM135M'
  found = shown(capsys, path, *tuned, VOCAB, '--fdl.VOCAB_SIZE=8192')
  assert '1 row of 512 tokens' in found['Rows']


def test_text_documents_and_mixtures(tmp_path, capsys):
  documents = write(tmp_path / 'a.jsonl', [{'text': f'number {i} ' * 20} for i in range(9)])
  (tmp_path / 'a.txt').write_text('One sentence of a text. ' * 400)
  found = shown(capsys, documents, VOCAB, '--fdl.MAX_SEQ_LEN=32', '--fdl.HELD_OUT_EVERY=1000')
  assert found['Contents'].startswith('9 documents, ')
  assert found['Cut'] == '9 documents of more than 32 tokens'
  assert found['text'].startswith(' 1, in [[ ]] what is learned:\n[[number ')
  found = shown(capsys, str(tmp_path / 'a.txt'), VOCAB, '--fdl.MAX_SEQ_LEN=32')
  assert '% full' in found['Rows']
  assert 'Cut' not in found
  config = '--fdl_config=tests.support.experiments.TinyMixture'
  out = shown(capsys, documents, str(tmp_path / 'a.txt'), config, VOCAB, '--fdl.WEIGHTS=[1,2]')[
    'out'
  ]
  assert out.count('Rows ') == 1  # and another one after the first example


def test_flat_tokens(tmp_path, capsys):
  documents = write(tmp_path / 'a.jsonl', [{'text': f'number {i} ' * 20} for i in range(9)])
  tokenize.main([VOCAB, f'--output={tmp_path / "flat"}', '--processes=1', documents])
  flags = '--fdl_config=tests.support.experiments.TinyTokens', VOCAB, '--fdl.ROWS=sequences'
  found = shown(capsys, str(tmp_path / 'flat'), *flags, '--fdl.NUM_EPOCHS=2')
  assert re.fullmatch(r'9 documents, [\d,]+ tokens, 288 learned \(\d+%\)', found['Contents'])
  assert found['Rows'] == '9 rows of 32 tokens, 100% full'
  assert found['Cut'] == '9 documents of more than 32 tokens'
  assert 'NUM_EPOCHS=2 is 5 steps' in found['out']


def test_a_long_stream_is_shown_in_part(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(data_report, '_MOST_DOCUMENTS', 10)
  documents = write(tmp_path / 'a.jsonl', [{'text': f'number {i} ' * 20} for i in range(50)])
  found = shown(capsys, documents, VOCAB)
  assert found['Contents'].startswith('the first 24 documents, ')
  assert found['Epoch'].startswith('about: ')


@pytest.mark.parametrize(
  ('argv', 'match'),
  [
    ([], 'name FILES, or an experiment'),
    (['b.jsonl', VOCAB], r'b.jsonl:1: the keys of this record \(question\) .*; or to text'),
    (['b.jsonl', VOCAB, '--fdl.TEXT_FIELD=answer'], "b.jsonl:1 has no text field 'answer'"),
    (['a.jsonl', VOCAB, '--fdl_config=TinyGPT'], 'TinyGPT reads no files'),
    (['--fdl_config=TinyGPT'], 'trains on synthetic, which paxlite data cannot show'),
    (['none.jsonl', VOCAB], 'none.jsonl is not a file'),
  ],
)
def test_what_cannot_be_shown(tmp_path, monkeypatch, argv, match):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / 'a.jsonl', EXAMPLES)
  write(tmp_path / 'b.jsonl', [{'question': 'a'}])
  with pytest.raises(UserError, match=match):
    tool.main(argv)


def test_what_is_learned_is_green_on_a_terminal_and_the_text_cannot_change_it():
  tokenizer = open_tokenizer(packaged.VOCAB)
  ids = [
    tokenizer.bos_id, *tokenizer.encode('a \x1b[31m'), *tokenizer.encode('b'), tokenizer.eos_id,
  ]  # fmt: skip
  learned = np.arange(len(ids)) >= len(ids) - 2
  text = data_summary.masked_text(tokenizer, ids, learned, color=True)
  assert text == '<s>a \\x1b[31m\x1b[32mb</s>\x1b[0m'


def test_special_tokens_of_a_json_tokenizer_are_shown(tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  bpe = tokenizers.ByteLevelBPETokenizer()
  bpe.train_from_iterator(['a b'], vocab_size=260, special_tokens=['<|end|>'])
  bpe.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = open_tokenizer(str(tmp_path))
  ids = tokenizer.encode('a b<|end|>')
  assert tokenizer.decode(ids) == 'a b'
  assert tokenizer.decode_marked(ids) == 'a b<|end|>'


@pytest.mark.parametrize('lengths', [[1], [7] * 5, [1, 2, 3], [*range(1, 1000), 10**6]])
def test_a_histogram_counts_everything_once(lengths):
  lines = data_summary.histogram(np.array(lengths))
  assert sum(int(line.split()[-1].replace(',', '')) for line in lines) == len(lengths)
  assert len(lines) <= 13


def test_bars_are_as_long_as_their_counts():
  lines = data_summary.histogram(np.array([1] * 8 + [2] * 4 + [4] * 2))
  longest = lines[0].count('#')
  assert [line.count('#') / longest for line in lines] == [1, 1 / 2, 0, 1 / 4]


def test_a_run_says_what_is_cut_and_left_out(tmp_path):
  path = write(tmp_path / 'a.jsonl', [*EXAMPLES, LONG])
  line = lambda **how: data_summary.lines(
    RowInput(SftRows([path], packaged.VOCAB, 64, 8192, **how), 4)
  )[0]
  assert 'the longest 26, 1 left out, in ' in line(too_long='skip')
  assert 'the longest 64, 1 cut, in ' in line(too_long='truncate')


def test_a_run_begins_with_lengths_and_one_example(tmp_path):
  source = SftRows([write(tmp_path / 'a.jsonl', EXAMPLES)], packaged.VOCAB, 64, 8192)
  first, *bars, title, example = data_summary.first_look(source, color=False)
  assert first.startswith('Examples by number of tokens:')
  assert bars == [f'  {line}' for line in data_summary.histogram(source.lengths)]
  assert (title, example) == (
    'The first example, in [[ ]] what is learned:',
    '<s>0 times 0?[[ word</s>]]',
  )
  assert data_summary.first_look(source, color=True)[-1] == '<s>0 times 0?\x1b[32m word</s>\x1b[0m'
  assert data_summary.example_text(source, 0, color=False, most=3).endswith(' …')
