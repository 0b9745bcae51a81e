"""generation_config.json: what is read of it, named, and refused."""

import pathlib

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.weights.generation_keys import read_generation, written_generation

PATH = pathlib.Path('generation_config.json')


def test_the_repetition_penalty_is_read_and_written():
  experiment = read_generation({'repetition_penalty': 1.5, 'temperature': 0.7}, TinyGPT(), PATH)
  assert experiment.REPETITION_PENALTY == experiment.sampling().repetition_penalty == 1.5
  assert written_generation(experiment) == {'repetition_penalty': 1.5}
  assert read_generation({}, TinyGPT(), PATH).REPETITION_PENALTY == 1
  assert written_generation(TinyGPT()) == {}


@pytest.mark.parametrize('penalty', [0, -1, 'much', True, float('nan'), float('inf')])
def test_a_penalty_that_is_none_is_refused(penalty):
  with pytest.raises(UserError, match='must be a number above 0'):
    read_generation({'repetition_penalty': penalty}, TinyGPT(), PATH)


def test_what_changes_a_text_and_is_not_read_is_named(caplog):
  read_generation({'no_repeat_ngram_size': 3, 'num_beams': 1, 'min_length': 0}, TinyGPT(), PATH)
  assert 'no_repeat_ngram_size changes what transformers writes' in caplog.text
  assert 'num_beams' not in caplog.text
