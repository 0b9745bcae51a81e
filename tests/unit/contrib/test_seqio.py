"""SeqIO on real TFDS datasets of real text: no loss, no duplicates, exact continuation."""

import itertools
import json
import subprocess

import numpy as np
import pytest

from paxlite.contrib.seqio_tasks import SeqioSource
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.documents import DocumentSource
from paxlite.data.positions import Field
from paxlite.data.streams import StreamInput
from paxlite.data.tokenizer import open_tokenizer
from paxlite.files.text_files import read_text
from paxlite.run_data.origins import ORIGIN, names_records, num_documents, pieces, place_of, traced
from tests.support import runs

pytestmark = pytest.mark.slow
T = 32
SCRIPTS = 'paxlite.contrib.gpu.scripts_gpu'


@pytest.fixture(scope='module', autouse=True)
def libraries():
  """Imports TensorFlow when a test needs it, because that takes 7 seconds."""
  for name in ('seqio', 'tensorflow_datasets'):
    pytest.importorskip(name)


def write(path, records) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))


def build(script: str, *flags: str, code: int = 0) -> subprocess.CompletedProcess:
  return runs.module(f'{SCRIPTS}.{script}', *flags, code=code, imported='seqio')


@pytest.fixture(scope='module')
def documents() -> list[str]:
  text = read_text(packaged.TEXTS[0])[:120_000]
  return [text[i : i + 700 + 13 * (i % 97)] for i in range(0, len(text), 2_000)]


@pytest.fixture(scope='module')
def tfds(tmp_path_factory, documents):
  """TFDS datasets that the scripts for users build from local files."""
  folder = tmp_path_factory.mktemp('tfds')
  mirror = folder / 'mirror'
  half = len(documents) // 2
  write(mirror / 'train' / '00.jsonl', [dict(text=d) for d in documents[:half]])
  write(mirror / 'train' / '01.jsonl', [dict(text=d) for d in documents[half:]])
  write(mirror / 'val.jsonl', [dict(text=d) for d in documents[:7]])
  flags = [f'--source={mirror}', f'--tfds_data_dir={folder}', '--num_shards=3']
  assert 'train: 60, validation: 7' in build('download_the_pile', *flags).stdout
  words = [d.split() for d in documents]
  write(mirror / 'lambada.jsonl', [dict(text=' '.join(w[3:14])) for w in words[:13]])
  build('download_lambada', f'--source={mirror / "lambada.jsonl"}', f'--tfds_data_dir={folder}')
  questions = [dict(question='is it', passage=d[:90], answer=i % 2 == 0) for i, d in
               enumerate(documents[:5])]  # fmt: skip
  write(mirror / 'boolq' / 'dev.jsonl', questions)
  write(mirror / 'boolq' / 'train.jsonl', questions * 2)
  build('download_boolq', f'--source={mirror / "boolq"}', f'--tfds_data_dir={folder}')
  return folder


@pytest.fixture
def pile(tfds):
  def make(split: str = 'train', batch_size: int = 4, **kwargs) -> StreamInput:
    source = SeqioSource('the_pile_lm', split, packaged.VOCAB, str(tfds))
    return StreamInput(source, T, batch_size, **kwargs)

  return make


def tokens_of(documents: list[str]) -> list[list[int]]:
  tokenizer = open_tokenizer(packaged.VOCAB)
  return [[*tokenizer.encode(d), tokenizer.eos_id] for d in documents]


def equal(a: list, b: list) -> bool:
  return len(a) == len(b) and all(
    x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x)
    for x, y in zip(a, b, strict=True)
  )


def batches(source: StreamInput, count: int, start: int = 0, process: int = 0, processes: int = 1):
  rows = source.batch_size // processes
  return list(
    itertools.islice(
      source.train_batches(start, slice(process * rows, (process + 1) * rows)), count
    )
  )


def targets(found: list) -> list[int]:
  return sorted(int(x) for b in found for x in b['labels'][b['weights'] > 0])


@pytest.mark.exhaustive
def test_one_pass_holds_every_token_once(pile, documents):
  found = list(pile('validation', shuffle=False).eval_batches(slice(0, 4)))
  expected = tokens_of(documents[:7])
  assert targets(found) == sorted(itertools.chain.from_iterable(expected))
  row = found[0]
  assert row['ids'][0, 0] == 0
  np.testing.assert_array_equal(row['ids'][:, 1:], row['labels'][:, :-1])


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('rows', ['stream', 'packed'])
def test_an_epoch_loses_and_doubles_nothing(rows, pile, documents):
  source = pile(rows=rows, batch_size=1)
  whole = []
  stream = source.train_batches(0, slice(0, 1))
  for step in itertools.count():
    batch = next(stream)
    # The position shows the end of an epoch. This row belongs to the next one.
    if source.position(step + 1)[0, Field.EPOCH] > 0:
      break
    whole.append(batch)
  limit = T if rows == 'packed' else None
  expected = itertools.chain.from_iterable(t[:limit] for t in tokens_of(documents))
  assert targets(whole) == sorted(expected)


def test_packed_examples_do_not_see_one_another(pile):
  (batch,) = batches(pile(rows='packed', batch_size=8), 1)
  for r in range(8):
    segments = batch['segment_ids'][r]
    for s in range(1, segments.max() + 1):
      here = segments == s
      assert batch['ids'][r][here][0] == 0
      np.testing.assert_array_equal(batch['segment_pos'][r][here], np.arange(here.sum()))


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('processes', [1, 2])
def test_a_seed_fixes_the_order_and_a_position_goes_on_in_it(processes, pile):
  for process in range(processes):
    whole = batches(pile(), 90, process=process, processes=processes)
    assert equal(whole[:5], batches(pile(), 5, process=process, processes=processes))
    for step in (1, 40, 89):
      stopped, resumed = pile(), pile()
      batches(stopped, step, process=process, processes=processes)
      resumed.seek(step, stopped.position(step))
      rest = batches(resumed, 90 - step, step, process, processes)
      assert equal(whole[step:], rest), step
  assert not equal(whole[:5], batches(pile(seed=5), 5))


@pytest.mark.exhaustive
def test_a_mixture_has_its_rates_and_goes_on(tmp_path, documents):
  """A user registered two tasks of text files; their rates are 3 to 1."""
  import seqio

  vocabulary = seqio.SentencePieceVocabulary(packaged.VOCAB)
  for name, part in (('kings', documents[:4]), ('judges', documents[4:9])):
    (tmp_path / name).write_text('\n'.join(d.replace('\n', ' ') for d in part))
    seqio.TaskRegistry.add(
      name,
      source=seqio.TextLineDataSource({'train': str(tmp_path / name)}),
      preprocessors=[
        seqio.map_over_dataset(lambda line: {'targets': line}),
        seqio.preprocessors.tokenize,
        seqio.preprocessors.append_eos,
      ],
      output_features={'targets': seqio.Feature(vocabulary)},
    )
  seqio.MixtureRegistry.add('kings_and_judges', [('kings', 3.0), ('judges', 1.0)])
  make = lambda: StreamInput(SeqioSource('kings_and_judges', 'train'), T, 4)
  source = make()
  whole = batches(source, 50)
  np.testing.assert_array_equal(sorted(source.position(50)[:, Field.ROWS]), [50, 150])
  alone = batches(StreamInput(SeqioSource('kings', 'train'), T, 1), 150)
  kings = {row['labels'].tobytes() for row in alone}
  shares = [sum(r.tobytes() in kings for r in b['labels'][:, None]) for b in whole]
  assert shares == [3] * 50
  stopped, resumed = make(), make()
  batches(stopped, 21)
  resumed.seek(21, stopped.position(21))
  assert equal(whole[21:], batches(resumed, 29, 21))


def test_wrong_names(tfds, tmp_path):
  make = lambda task, split='train', folder=tfds: SeqioSource(
    task, split, packaged.VOCAB, str(folder)
  )
  with pytest.raises(UserError, match="no SeqIO task or mixture is named 'nothing'"):
    make('nothing')
  with pytest.raises(UserError, match="the_pile_lm has no split 'dev'; it has train, validation"):
    make('the_pile_lm', 'dev')
  with pytest.raises(UserError, match='c4: its dataset is not in'):
    make('c4')
  with pytest.raises(UserError, match='is not a folder'):
    make('the_pile_lm', folder=tmp_path / 'gone')
  with pytest.raises(UserError, match='no tokenizer is set:'):
    SeqioSource('the_pile_lm', 'train', tfds_data_dir=str(tfds))


def test_scripts_name_what_is_wrong(tfds, tmp_path):
  said = build('download_the_pile', f'--source={tmp_path}', f'--tfds_data_dir={tmp_path}', code=2)
  assert 'holds neither train.jsonl' in said.stderr
  write(tmp_path / 'train.jsonl', [dict(text='a'), dict(body='b')])
  said = build('download_the_pile', f'--source={tmp_path}', f'--tfds_data_dir={tmp_path}', code=2)
  assert 'train.jsonl:2 is not a record of this dataset' in said.stderr
  write(tmp_path / 'train.jsonl', [dict(text='a'), dict(text=5)])
  said = build('download_the_pile', f'--source={tmp_path}', f'--tfds_data_dir={tmp_path}', code=2)
  assert "train.jsonl:2 is not a record of this dataset: 'text' must be text, not 5" in said.stderr
  (tmp_path / 'SHA256SUMS.txt').write_text(f'{"0" * 64}  train.jsonl\n')
  said = build('download_the_pile', f'--source={tmp_path}', f'--tfds_data_dir={tmp_path}', code=2)
  assert 'is damaged or another file' in said.stderr
  said = build('download_lambada', f'--source={tmp_path}/x', f'--tfds_data_dir={tfds}', code=2)
  assert 'exists already' in said.stderr


SIZES = dict(NUM_LAYERS=1, NUM_HEADS=2, MODEL_DIMS=16, VOCAB_SIZE=8192, MAX_SEQ_LEN=T,
             FPROP_DTYPE='float32', ICI_MESH_SHAPE='[1,1,1]', DCN_MESH_SHAPE='[1,1,1]')  # fmt: skip


def test_pile126m_and_lambada126m_as_pax_users_call_them(tfds, tmp_path):
  """The run is trained at once, and also stopped and continued; LAMBADA uses its checkpoints."""
  sizes = [f'--fdl.{k}={v}' for k, v in SIZES.items()]
  numbers = dict(PERCORE_BATCH_SIZE=4, SUMMARY_INTERVAL_STEPS=1, MAX_EVAL_BATCHES=1)
  flags = [*sizes, f'--tfds_data_dir={tfds}', *(f'--fdl.{k}={v}' for k, v in numbers.items())]
  env = {'VOCAB_PATH': packaged.VOCAB, 'TF_CPP_MIN_LOG_LEVEL': '3'}
  run = lambda folder, steps: runs.run(
    tmp_path / folder, *flags, f'--fdl.MAX_STEPS={steps}', config='Pile126M', env=env,
    imported='seqio',
  )  # fmt: skip
  run('whole', 5)
  run('parts', 2)
  run('parts', 5)
  whole, parts = runs.losses(tmp_path / 'whole'), runs.losses(tmp_path / 'parts')
  assert whole == parts
  assert len(whole) == 5
  result = runs.run(
    tmp_path / 'whole', *sizes, f'--tfds_data_dir={tfds}', '--mode=eval',
    "--fdl.EVAL_TASKS=['lambada','boolq']", config='Lambada126M', env=env, imported='seqio',
  )  # fmt: skip
  assert 'eval lambada at step 5' in result.stdout
  assert 'eval boolq at step 5' in result.stdout
  other = runs.run(
    tmp_path / 'whole', *sizes, '--fdl.NUM_LAYERS=2', f'--tfds_data_dir={tfds}', '--mode=eval',
    config='Lambada126M', env=env, imported='seqio', code=2,
  )  # fmt: skip
  assert 'holds checkpoints of another model: NUM_LAYERS 1 → 2' in other.stderr


def test_llama7b_learns_and_evaluates_boolq_as_pax_users_call_it(tfds, tmp_path):
  sizes = SIZES | dict(HIDDEN_DIMS=32, PERCORE_BATCH_SIZE=2, MAX_STEPS=3, MAX_SEQ_LEN=128)
  flags = [f'--fdl.{k}={v}' for k, v in sizes.items()]
  flags.append(f'--fdl.TFDS_DATA_DIR={tfds}')
  env = {'VOCAB_PATH': packaged.VOCAB, 'TF_CPP_MIN_LOG_LEVEL': '3'}
  run = lambda *more: runs.run(
    tmp_path / 'run', *flags, *more, config='LLaMA7B', env=env, imported='seqio'
  )
  assert 'step 3' in run('--fdl.SUMMARY_INTERVAL_STEPS=1', '--fdl.USE_LORA=True').stdout
  found = run('--mode=eval', '--fdl.USE_LORA=True').stdout
  assert 'eval boolq at step 3' in found
  assert 'eval validation at step 3' in found


def test_what_is_known_of_where_texts_come_from(pile, tfds, documents):
  """SeqIO does not name records; TFDS read by paxlite itself does."""
  data = pile(rows='packed')
  batches = data.train_batches(0, slice(0, 4))
  for batch, _ in zip(traced(data).train_batches(0, slice(0, 4)), range(5), strict=False):
    for name, array in next(batches).items():
      np.testing.assert_array_equal(batch[name], array)
    assert ((batch[ORIGIN][..., 0] >= 0) == (batch['segment_ids'] > 0)).all()
    piece = pieces(batch, 1)[0]
    assert 'SeqIO does not name records' in str(place_of(data, piece.key))
    assert not names_records(data, piece.key)
  name = 'tfds:the_pile:1.0.0/train'
  source = DocumentSource([name], packaged.VOCAB, 8192, tfds_data_dir=str(tfds))
  data = StreamInput(source, T, 4)
  assert num_documents(data) == len(documents)
  (records,) = source.datasets[0].sources
  batch = next(traced(data).train_batches(0, slice(0, 4)))
  for row in range(4):
    for piece in pieces(batch, row):
      place = place_of(data, piece.key)
      shard = int(place.source.removeprefix(f'{name}[').removesuffix(']'))
      _, record = next(records.read(shard, place.record))
      ids = open_tokenizer(packaged.VOCAB).encode(record['text'])
      here = batch['labels'][row, piece.start : piece.end].tolist()
      assert [*ids, 2][piece.token : piece.token + len(here)] == here
