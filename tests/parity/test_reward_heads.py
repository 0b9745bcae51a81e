"""Reward models of GPT-2's descendants: names of tensors have a prefix, but not those of heads."""

import pathlib

import numpy as np
import pytest

from paxlite.experiments.gpt_bigcode import GPTBigCode
from paxlite.experiments.gpt_neo import GPTNeo
from paxlite.experiments.gptj import GPTJ
from paxlite.experiments.reward_model import RewardModel
from paxlite.tools import export_weights
from paxlite.weights.families import hugging_face_entries
from paxlite.weights.folder import write_weights
from tests.support.families import experiment


class JudgeGPTJ(RewardModel, GPTJ):
  pass


class JudgeGPTNeo(RewardModel, GPTNeo):
  pass


class JudgeGPTBigCode(RewardModel, GPTBigCode):
  pass


class Drawn:
  """Random tensors of the shapes of entries."""

  def __init__(self, entries):
    rng = np.random.default_rng(0)
    self.values = {e.theirs: rng.normal(size=e.shape).astype(np.float32) for e in entries}
    self.shapes = {name: value.shape for name, value in self.values.items()}

  def read(self, name: str) -> np.ndarray:
    return self.values[name]


@pytest.mark.parametrize(
  ('case', 'cls'),
  [('gptj', JudgeGPTJ), ('gpt_neo', JudgeGPTNeo), ('gpt_bigcode', JudgeGPTBigCode)],
)
def test_transformers_finds_every_tensor(case, cls, tmp_path):
  transformers = pytest.importorskip('transformers')
  e = cls(**experiment(case).values())
  entries = hugging_face_entries(e)
  drawn = Drawn(entries)
  write_weights(pathlib.Path(tmp_path / 'w'), e, entries, drawn, None, lambda *_: None)
  export_weights.main([f'--checkpoint={tmp_path}/w', '--to=hf', f'--path={tmp_path}/hf'])
  read, found = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / 'hf', output_loading_info=True
  )
  assert not found['missing_keys']
  assert not found['unexpected_keys']
  np.testing.assert_array_equal(read.score.weight.detach().numpy(), drawn.values['score.weight'])
