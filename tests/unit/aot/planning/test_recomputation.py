"""CHECKPOINT_POLICY=AUTO: the policy follows the memory of the devices, and a run keeps it."""

import dataclasses
import json

import pytest

from paxlite.aot.planning import recomputation
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.llama import LLaMA
from paxlite.programs.first_start import as_begun
from paxlite.programs.run import Run
from paxlite.programs.training import train
from tests.support import runs
from tests.unit.aot.planning import machines

pytestmark = pytest.mark.slow


class Tiny(Synthetic, LLaMA):
  """A model whose steps need more memory the more they keep."""

  NUM_LAYERS = 2
  NUM_HEADS = NUM_KV_HEADS = 4
  MODEL_DIMS = 32
  HIDDEN_DIMS = 64
  VOCAB_SIZE = 128
  MAX_SEQ_LEN = 32
  PERCORE_BATCH_SIZE = 8
  USE_REPEATED_LAYER = True
  ICI_MESH_SHAPE = DCN_MESH_SHAPE = [1, 1, 1]
  MAX_STEPS = 4
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 2


@pytest.fixture
def devices(monkeypatch):
  """Sets the memory of the devices; None: it is not known."""

  def put(memory: float | None) -> None:
    one = machines.machine('v5e', 'tpu', 1, memory=memory or 0.0, peak_flops=1e9)
    one = dataclasses.replace(one, chip=dataclasses.replace(one.chip, memory=1 << 30))
    monkeypatch.setattr(recomputation, 'machine', lambda: one if memory else None)

  return put


def chosen() -> tuple[str, str]:
  return recomputation.chosen(Tiny(), lambda: None)


def test_less_memory_keeps_less(devices):
  """A program that needs more than there is, is not chosen."""
  devices(1e9)
  most, said = chosen()
  assert said.startswith(f'CHECKPOINT_POLICY={most}: it recomputes less than SAVE_NOTHING')
  needed = recomputation.compiled(
    Tiny(CHECKPOINT_POLICY=most), recomputation._Present('here', recomputation.machine().chip, 1)
  ).memory
  devices(needed - 1)
  less, _ = chosen()
  assert less not in (most, 'AUTO')
  devices(1e4)
  assert chosen() == ('SAVE_NOTHING', '')
  devices(None)
  assert chosen() == ('AUTO', '')


def test_a_run_keeps_its_policy(devices, tmp_path):
  """It goes on bit for bit where memory would now allow less; a stated policy is not touched."""
  devices(1e9)
  policy, _ = chosen()
  train(Run(Tiny(MAX_STEPS=2), tmp_path / 'run'))
  devices(1e4)
  run = Run(Tiny(), tmp_path / 'run')
  train(run)
  written = json.loads((tmp_path / 'run' / 'experiment.json').read_text())
  assert written['values']['CHECKPOINT_POLICY'] == policy != 'SAVE_NOTHING'
  assert policy == as_begun(run).experiment.CHECKPOINT_POLICY
  train(Run(Tiny(CHECKPOINT_POLICY=policy), tmp_path / 'stated'))
  assert runs.losses(tmp_path / 'run') == runs.losses(tmp_path / 'stated')
  assert len(runs.losses(tmp_path / 'run')) == 4


def test_the_memory_of_a_cpu_is_not_known():
  assert recomputation.machine() is None
