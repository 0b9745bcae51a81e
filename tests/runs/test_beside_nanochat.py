"""The comparison with nanochat at tiny sizes: paxlite trains, and a script stands for nanochat."""

import itertools
import json
import sys

import pytest

from benchmarks.nanochat import __main__ as beside
from benchmarks.nanochat import documents
from paxlite.data import packaged
from paxlite.data.flat_tokens import open_flat_tokens
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text

VOCAB_SIZE = 400
STAND_IN = """#!{python}
import os, pathlib, sys
base, words = pathlib.Path(os.environ['NANOCHAT_BASE_DIR']), sys.argv[2:]
with (base / 'calls').open('a') as f:
  f.write(' '.join(words) + '\\n')
if 'scripts.tok_train' in words:
  (base / 'tokenizer').mkdir()
  (base / 'tokenizer' / 'token_bytes.pt').touch()
elif 'scripts.base_train' in words:
  tag, = (w.partition('=')[2] for w in words if w.startswith('--model-tag'))
  (base / 'base_checkpoints' / tag).mkdir(parents=True)
  for i in range(12):
    print(f'step {{i:05d}}/00012 | dt: {{1000 if i < 10 else 250}}.00ms | tok/sec: 1')
else:
  print('{{"3": 2.5}}')
"""


@pytest.fixture
def few_texts(monkeypatch, tmp_path):
  text = tmp_path / 'text.txt'
  text.write_text(read_text(packaged.TEXTS[0])[:60_000])
  monkeypatch.setattr(packaged, 'TEXTS', [str(text)])

  monkeypatch.setattr(beside, 'LENGTH', 64)
  return text.read_text()


def run(monkeypatch, capsys, tmp_path, *flags):
  words = [str(tmp_path / 'nanochat'), str(tmp_path / 'runs'), '--depth=1', '--steps=3']
  words += [f'--vocab={VOCAB_SIZE}', *flags]
  monkeypatch.setattr(sys, 'argv', ['nanochat', *words])
  beside.main()
  return capsys.readouterr().out


def test_held_out_documents_are_apart_and_whole(few_texts, tmp_path):
  train, held_out = documents.documents()
  assert sorted(' '.join(train + held_out).split()) == sorted(few_texts.split())
  assert not {*train} & {*held_out}
  documents.write(tmp_path, [0, 1], VOCAB_SIZE, 64)
  tokens, starts, _ = open_flat_tokens(str(tmp_path / 'paxlite'), 'validation')
  tokenizer = open_tokenizer(str(tmp_path / 'paxlite' / 'tokenizer.model'))
  ends = starts[:].astype(int).tolist()
  rows = [tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
  assert max(map(len, rows)) == 64
  assert ''.join(tokenizer.decode(ids) for ids in rows) == ''.join(held_out)
  size = json.loads((tmp_path / 'paxlite' / 'held_out.json').read_text())
  assert size == {'tokens': len(tokens), 'bytes': len(''.join(held_out).encode())}
  orders = [tmp_path / f'nanochat_{n}/base_data_climbmix/shard_00000.parquet' for n in (0, 1)]
  assert orders[0].read_bytes() != orders[1].read_bytes()


def test_paxlite_side(few_texts, monkeypatch, capsys, tmp_path):
  flags = '--sides', 'paxlite', '--scales', '2', f'--json={tmp_path / "found.jsonl"}'
  out = run(monkeypatch, capsys, tmp_path, *flags)
  (found,) = beside.results(tmp_path / 'found.jsonl')
  assert [*found['bits_per_byte']] == ['1', '2', '3']
  assert all(1 < bits < 8 for bits in found['bits_per_byte'].values())
  assert '| paxlite | 1 × 64 | 3 | 2.0 | 0 | ' in out
  (rates,) = (tmp_path / 'runs' / 'runs').glob('*/metrics.jsonl')
  assert max(r['lr'] for r in beside.results(rates)) == pytest.approx(2 * beside.RATE)
  monkeypatch.setattr(beside, 'SIDES', {'paxlite': None})  # nothing is trained again
  again = run(monkeypatch, capsys, tmp_path, *flags)
  assert again == out[out.index('| |') :]


def test_commands_and_results_of_nanochat(few_texts, monkeypatch, capsys, tmp_path):
  python = tmp_path / 'python'
  python.write_text(STAND_IN.format(python=sys.executable))
  python.chmod(0o755)
  (tmp_path / 'nanochat').mkdir()
  flags = '--sides', 'nanochat', '--their_scales', '5', f'--python={python}'
  run(monkeypatch, capsys, tmp_path, *flags)
  (found,) = beside.results(tmp_path / 'runs' / 'results.jsonl')
  assert (found['step_seconds'], found['bits_per_byte']) == (0.25, {'3': 2.5})
  tokenizer, training, evaluation = (
    (tmp_path / 'runs' / 'nanochat_0' / 'calls').read_text().splitlines()
  )
  assert tokenizer == f'-m scripts.tok_train --vocab-size={VOCAB_SIZE}'
  assert {'--matrix-lr=0.1', '--weight-decay=0.056', '--depth=1'} <= {*training.split()}
  assert evaluation.split()[1:] == ['d1_w64_n3_x5', '1', '2', '3']
  run(monkeypatch, capsys, tmp_path, *flags, '--time_only')
  times = beside.results(tmp_path / 'runs' / 'times.jsonl')
  assert [r['round'] for r in times] == [0, 1, 2]
  assert all(r['step_seconds'] == 0.25 and 'bits_per_byte' not in r for r in times)
