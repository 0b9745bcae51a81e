"""The thread that runs an engine: an answer whose text fails is that request's alone."""

import asyncio

import pytest

from paxlite.generation.engine import Engine
from paxlite.generation.request import Request
from paxlite.serving.worker import Worker
from tests.unit.generation.test_engine import made


class Tokens:
  """A tokenizer that cannot decode the answers to one prompt."""

  wrong: frozenset[int] = frozenset()

  def decode(self, ids):
    if self.wrong.intersection(ids):
      raise ValueError('these ids have no text')
    return ' '.join(map(str, ids))

  decode_marked = decode


async def answer(worker, request):
  (ticket,) = worker.submit([request])
  async for progress in ticket.news():
    if progress.answer is not None:
      return progress.answer.text


def test_a_text_that_cannot_be_decoded_ends_its_own_answer():
  model, params = made('window')
  tokenizer = Tokens()
  engine = Engine(model, params, 64, tokenizer=tokenizer)
  requests = [Request([5, 6, i], 6) for i in range(4)]
  texts = [each.text for each in engine.generate(requests)]
  own = [{*map(int, text.split())} for text in texts]
  tokenizer.wrong = frozenset(own[0] - set().union(*own[1:]))
  assert tokenizer.wrong
  worker = Worker(engine, 8)
  worker.start()

  async def ask():
    return await asyncio.gather(*(answer(worker, r) for r in requests), return_exceptions=True)

  for _ in range(2):
    failed, *others = asyncio.run(ask())
    assert isinstance(failed, ValueError)
    assert others == texts[1:]
    assert worker.count == 0
  worker.stop()
  with pytest.raises(ValueError, match='no text'):
    tokenizer.decode([*tokenizer.wrong])
