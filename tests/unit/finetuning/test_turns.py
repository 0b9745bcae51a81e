"""Episodes of several turns have the ids that were sampled, whatever a chat template writes."""

import itertools
import json
import random
import types

import numpy as np
import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.core.errors import UserError
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.reinforcement import actor as actors
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.finetuning.reinforcement.answer_rollouts import Answered
from paxlite.finetuning.reinforcement.policy_rollouts import PolicyRollouts, _facts
from paxlite.finetuning.reinforcement.prompts import Prompt

tokenizers = pytest.importorskip('tokenizers')

from tests.support.tokenizer_draws import LEARNED_FROM, TEMPLATES, TEXTS  # noqa: E402

CHATML = '<|im_end|>', '\n<|im_start|>{}\n{}<|im_end|>', '\n<|im_start|>assistant\n'
PARTS = {  # what a template writes after an answer: its end, each message, and before the next one
  'chatml': CHATML,
  'think': CHATML,  # leaves out the thinking of answers before the last question
  'tools': CHATML,
  'zephyr': ('</s>', '\n<|{}|>\n{}</s>', '\n<|assistant|>\n'),
  'gemma': ('<end_of_turn>', '\n<start_of_turn>{}\n{}<end_of_turn>', '\n<start_of_turn>model\n'),
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """A tokenizer with merges, so that a text has many encodings."""
  folder = tmp_path_factory.mktemp('tokenizer')
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  marks = ['<s>', '</s>', '<|im_start|>', '<|im_end|>', '<start_of_turn>', '<end_of_turn>']
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  made.train_from_iterator(LEARNED_FROM, tokenizers.trainers.BpeTrainer(
    vocab_size=420, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
  ))  # fmt: skip
  made.save(str(folder / 'tokenizer.json'))
  stated = {'bos_token': '<s>', 'eos_token': '</s>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(stated))
  return open_tokenizer(str(folder))


class Drawn:
  """An engine and an environment that draw what they say."""

  def __init__(self, rng, encoding, end, turns):
    self._rng, self._encoding, self._turns, self.end = rng, encoding, turns, end
    self.tokenizer, self.sampling, self.ends = encoding.tokenizer, None, []
    self.sampled, self.replied = [], []

  def add(self, request):
    text = self._rng.choice(TEXTS[1:])
    if self._rng.random() < 0.5:
      text = f'<think>\nwhy {text}\n</think>\n\n{text}'
    ids, rest = [], text
    while rest:  # in pieces, which no tokenizer would have made
      piece, rest = rest[: (cut := self._rng.randint(1, 6))], rest[cut:]
      ids += self.tokenizer.encode(piece)
    (end,) = self._encoding.marked(self.end)
    self.sampled.append([*ids, end])
    assert len(request.prompt) + len(ids) < 4000
    answer = types.SimpleNamespace(ids=ids, finish='stop', end=end, spelled=text, scores=[])
    return types.SimpleNamespace(answer=answer, check=lambda: None)

  def cancel(self, job):
    pass

  def replies(self, episodes):
    self._turns -= 1
    said = [
      {'role': self._rng.choice(['user', 'tool']), 'content': self._rng.choice(['on', 'a\nb', '7'])}
      for _ in range(self._rng.randint(1, 2))
    ]
    self.replied.append(said)
    return [said if self._turns > 0 else None for _ in episodes]


def played(rng, tokenizer, name, turns, monkeypatch, max_seconds=0.0):
  """Returns an episode, and what was sampled and replied."""
  end = PARTS[name][0]
  encoding = ChatEncoding(tokenizer, chat_template=TEMPLATES[name])
  drawn = Drawn(rng, encoding, end, turns)
  monkeypatch.setattr(actors, 'Engine', lambda *_, **__: drawn)
  actor = Actor(encoding, None, None, None, 4000, None, 1, 4000, 100, 8, max_seconds)
  asked = [{'role': 'user', 'content': 'What is 17 + 4?'}]
  prompt = Prompt({}, encoding.chat_prompt(asked), asked, 'a:1')
  (episode,) = actor.play(None, [prompt], drawn, 0)
  return episode, drawn


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', PARTS)
def test_what_was_sampled_is_kept_and_learned_and_nothing_else(tokenizer, name, seed, monkeypatch):
  """As in https://github.com/huggingface/trl/issues/5144, where a text was encoded again and its
  mask was too long, https://github.com/PrimeIntellect-ai/verifiers/issues/11, where replies were
  learned, and https://github.com/PrimeIntellect-ai/prime-rl/issues/1334, where Qwen3's template
  left out earlier thinking and ended the run.
  """
  rng = random.Random(seed)
  turns = rng.randint(2, 4)
  episode, drawn = played(rng, tokenizer, name, turns, monkeypatch)
  _, message, answer = PARTS[name]
  ids, is_own = [*episode.prompt.ids], [False] * len(episode.prompt.ids)
  for i, sampled in enumerate(drawn.sampled):
    ids, is_own = ids + sampled, is_own + [True] * len(sampled)
    assert episode.ends[i] == len(ids)
    if i + 1 < turns:
      said = drawn.replied[i]
      text = ''.join(message.format(m['role'], m['content']) for m in said) + answer
      after = episode.ids[len(ids) : len(episode.ids)]
      count = episode.is_own[len(ids) :].index(True)
      assert tokenizer.decode_marked(after[:count]) == text
      ids, is_own = ids + after[:count], is_own + [False] * count
  assert len(drawn.sampled) == len(episode.ends) == turns
  assert episode.ids == ids
  assert episode.is_own == is_own
  assert not episode.is_cut


def test_a_template_that_drops_messages_ends_the_run_in_one_line(tokenizer, monkeypatch):
  dropping = TEMPLATES['chatml'].replace('in messages', 'in messages[-1:]')
  monkeypatch.setitem(TEMPLATES, 'chatml', dropping)
  with pytest.raises(UserError, match='the chat template changes earlier messages'):
    played(random.Random(0), tokenizer, 'chatml', 3, monkeypatch)


@pytest.mark.parametrize('late', [1, 2, 9])
def test_an_episode_ends_after_its_seconds(tokenizer, late, monkeypatch):
  """Each turn takes a second; the reply that comes too late is not appended."""
  clock = iter(range(100))
  monkeypatch.setattr(actors.time, 'monotonic', lambda: next(clock))
  episode, drawn = played(random.Random(0), tokenizer, 'chatml', 4, monkeypatch, late - 0.5)
  assert len(drawn.sampled) == len(episode.ends) == min(late, 4)
  assert episode.is_cut == (late < 4)
  assert episode.is_own[-1]


@pytest.mark.parametrize('seed', range(3))
def test_each_answer_learns_from_its_own_advantage(tokenizer, seed, monkeypatch):
  rng = random.Random(seed)
  turns = rng.randint(1, 4)
  episode, drawn = played(rng, tokenizer, 'chatml', turns, monkeypatch)
  rollouts = PolicyRollouts.__new__(PolicyRollouts)
  rollouts.seq_len = len(episode.ids) + 3
  rollouts._actor = types.SimpleNamespace(check=None)
  values = [rng.gauss(0, 1) for _ in range(5)]  # others of the batch had five turns
  row = rollouts._row(Answered(episode, _facts(episode, 2.5, values)))
  learned = [
    value for value, ids in zip(values, drawn.sampled, strict=False) for _ in range(len(ids))
  ]
  assert row['labels'][row['weights'] > 0].tolist() == [*itertools.chain(*drawn.sampled)]
  assert row['advantages'][row['weights'] > 0].tolist() == np.float32(learned).tolist()
  assert (row['advantages'][row['weights'] == 0] == 0).all()
  assert row['rewards'].sum() == 2.5
