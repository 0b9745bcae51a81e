"""Several processes through main: the same losses as one, also saved by few and gone on by many."""

import json
import math
import socket
import subprocess

import pytest

from paxlite import data, distributed
from paxlite.errors import UserError
from paxlite.inputs.files import read_text
from tests import runs

FLAGS = [
  '--fdl.ICI_MESH_SHAPE=[2,2,1]', '--fdl.PERCORE_BATCH_SIZE=1', '--fdl.SUMMARY_INTERVAL_STEPS=1',
  '--fdl.CHECKPOINT_EVERY_N_STEPS=3', '--fdl.EVAL_INTERVAL_STEPS=3', '--fdl.PACKED_INPUT=False',
]  # fmt: skip


def on_processes(folder, count: int, *flags: str, config: str) -> list[str]:
  """Runs main on `count` processes of 4 / count devices; returns what each printed."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{s.getsockname()[1]}'
  started = [
    subprocess.Popen(
      runs.command(
        folder, *FLAGS, *flags, '--multiprocess_gpu', f'--server_addr={address}',
        f'--num_hosts={count}', f'--host_idx={i}', config=config,
      ),
      cwd=runs.ROOT, env=runs.environment(4 // count), text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i in range(count)
  ]  # fmt: skip
  ended = [p.communicate(timeout=300) for p in started]
  for process, (_, stderr) in zip(started, ended, strict=True):
    assert process.returncode == 0, stderr
  return [stdout for stdout, _ in ended]


@pytest.mark.slow
def test_two_processes_are_as_one_and_go_on_as_one(tmp_path):
  config = 'tests.experiments.TinyText'
  alone, two, mixed = (tmp_path / name for name in ('alone', 'two', 'mixed'))
  runs.run(alone, *FLAGS, '--fdl.MAX_STEPS=6', config=config, devices=4)
  printed = on_processes(two, 2, '--fdl.MAX_STEPS=6', config=config)
  assert 'step 6' in printed[0]
  assert 'step 6' not in printed[1]
  on_processes(mixed, 2, '--fdl.MAX_STEPS=3', config=config)
  runs.run(mixed, *FLAGS, '--fdl.MAX_STEPS=6', config=config, devices=4)
  expected = runs.losses(alone)
  assert len(expected) == 6
  for folder in (two, mixed):
    found = runs.losses(folder)
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[s], expected[s], rel_tol=1e-5) for s in expected)


@pytest.mark.slow
def test_one_saves_and_two_go_on(tmp_path):
  alone, mixed = tmp_path / 'alone', tmp_path / 'mixed'
  runs.run(alone, *FLAGS, '--fdl.MAX_STEPS=6', devices=4)
  runs.run(mixed, *FLAGS, '--fdl.MAX_STEPS=3', devices=4)
  on_processes(mixed, 2, '--fdl.MAX_STEPS=6', config='TinyGPT')
  expected, found = runs.losses(alone), runs.losses(mixed)
  assert all(math.isclose(found[s], expected[s], rel_tol=1e-5) for s in range(1, 7))


@pytest.mark.parametrize(
  ('arguments', 'match'),
  [
    (('h:1', 2, None), '--host_idx missing: one of several'),
    (('h', 2, 0), '--server_addr=h must be HOST:PORT'),
    (('h:1', 2, 2), '--host_idx=2 must be from 0 to --num_hosts=2'),
    ((None, None, None, True), '--multiprocess_gpu needs --server_addr'),
  ],
)
def test_arguments_that_cannot_be(arguments, match):
  with pytest.raises(UserError, match=match):
    distributed.join(*arguments)


@pytest.mark.slow
def test_streams_of_two_processes_go_on_where_each_stood(tmp_path):
  lines = [p for p in read_text(data.TEXTS[0])[:200_000].split('\n\n') if p.strip()]
  path = tmp_path / 'c.jsonl'
  path.write_text(''.join(json.dumps({'text': line}) + '\n' for line in lines))
  flags = [f'--fdl.TRAIN_SOURCES={[str(path)]}', f'--fdl.VOCAB_PATH={data.VOCAB}',
           '--fdl.HELD_OUT_EVERY=5', '--fdl.MAX_EVAL_BATCHES=1']  # fmt: skip
  config = 'tests.experiments.TinyDocuments'
  on_processes(tmp_path / 'whole', 2, *flags, '--fdl.MAX_STEPS=6', config=config)
  on_processes(tmp_path / 'halves', 2, *flags, '--fdl.MAX_STEPS=3', config=config)
  on_processes(tmp_path / 'halves', 2, *flags, '--fdl.MAX_STEPS=6', config=config)
  assert runs.losses(tmp_path / 'whole') == runs.losses(tmp_path / 'halves')
  flags = [*FLAGS, *flags, '--fdl.MAX_STEPS=9']
  refused = runs.run(tmp_path / 'halves', *flags, config=config, devices=4, code=2)
  assert 'holds positions of 2 processes' in refused.stderr
