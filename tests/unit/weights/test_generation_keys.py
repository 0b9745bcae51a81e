"""generation_config.json: what is read of it, named, refused, and written again."""

import pathlib
import random

import pytest

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.weights.generation_keys import read_generation, written_generation

PATH = pathlib.Path('generation_config.json')
PUBLISHED = dict(
  do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, pad_token_id=7,
  bos_token_id=5, eos_token_id=[2, 3], max_new_tokens=512, use_cache=True, num_beams=1,
  transformers_version='5.24.0', repetition_penalty=1.2, min_new_tokens=0, bad_words_ids=None,
)  # fmt: skip


def test_the_repetition_penalty_is_read_and_written():
  experiment = read_generation({'repetition_penalty': 1.5}, TinyGPT(), PATH)
  assert experiment.REPETITION_PENALTY == experiment.sampling().repetition_penalty == 1.5
  assert written_generation(experiment, {}) == {'repetition_penalty': 1.5}
  without = experiment.replaced(REPETITION_PENALTY=1.0)
  assert written_generation(without, {}) == {'repetition_penalty': 1.0}
  assert read_generation({}, TinyGPT(), PATH).REPETITION_PENALTY == 1
  assert written_generation(TinyGPT(), {}) == {}


def test_every_key_is_written_again(caplog):
  rng = random.Random(0)
  for _ in range(20):
    keys = rng.sample([*PUBLISHED], rng.randint(1, len(PUBLISHED)))
    given = {key: PUBLISHED[key] for key in keys}
    experiment = read_generation(given | {'_from_model_config': True}, TinyGPT(), PATH)
    assert written_generation(experiment, {'eos_token_id': None}) == given
    changed = written_generation(experiment, {'eos_token_id': 9})
    assert changed == given | {'eos_token_id': 9}
    # of its sampling, the penalty alone is a default here: the likeliest token is taken
    assert experiment.sampling() == Sampling(repetition_penalty=given.get('repetition_penalty', 1))
  assert not caplog.text


@pytest.mark.parametrize('penalty', [0, -1, 'much', True, float('nan'), float('inf')])
def test_a_penalty_that_is_none_is_refused(penalty):
  with pytest.raises(UserError, match='must be a number above 0'):
    read_generation({'repetition_penalty': penalty}, TinyGPT(), PATH)


def test_what_changes_a_text_and_is_not_read_is_named(caplog):
  given = dict(
    no_repeat_ngram_size=3, num_beams=1, min_length=0, forced_decoder_ids=[[1, 5]], typical_p=1.0,
    suppress_tokens=[], stop_strings=['x'], tomorrow=2,
  )  # fmt: skip
  read_generation(given, TinyGPT(), PATH)
  named = (
    'forced_decoder_ids, no_repeat_ngram_size, stop_strings changes the text that transformers '
    'generates, and is not supported'
  )
  assert named in caplog.text
  assert ': tomorrow is unknown and ignored' in caplog.text
  assert not any(key in caplog.text for key in ('num_beams', 'min_length', 'typical', 'suppress'))
