"""Replies give the text of an answer exactly: its tokens, their bytes and places, and its parts."""

import itertools
import random
import types

import pytest

from paxlite.config.generation import Sampling
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.generation.job import Job
from paxlite.generation.request import Request, TokenScore
from paxlite.serving.bodies import Bodies, CompletionRequest, RequestLimits, _sampling
from paxlite.serving.fields import RequestFields
from paxlite.serving.replies import ChatReply, Reply
from tests.unit.generation.test_spelling import KINDS, made, texts

pytest.importorskip('tokenizers')
CALL = '{"name": "f", "arguments": {}}'


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
  return {kind: made(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def answered(tokenizer, prompt, ids, end=None, top=()):
  """Returns the job of an answer, as an engine makes it, and the parts of its stream."""
  request = Request(prompt, 99, ends=[] if end is None else [end], scored_from=0)
  job, parts = Job(request, tokenizer), []
  score = {token: -1.0 - i for i, token in enumerate(top)}
  for token in [*ids, *([] if end is None else [end])]:
    job.wrote(token, TokenScore(-0.5, {token: -0.5, **score}))
    parts.append(job.parts())
  if end is None:
    job.end('length')
    parts.append(job.parts())
  return job.answer, parts


@pytest.mark.parametrize('kind', KINDS)
def test_the_tokens_of_a_completion_are_its_text(tokenizers, kind):
  tokenizer = tokenizers[kind]
  end = tokenizer.special_id('eos_token')
  both = tokenizer.encode('The capital of France is  Paris 東京 😀')
  prompt, ids = [tokenizer.special_id('bos_token'), *both[:5]], both[5:]
  answer, parts = answered(tokenizer, prompt, ids, end, tokenizer.encode(' a'))
  whole = tokenizer.decode(both)
  asked = CompletionRequest([], [prompt], 1, False, False, 3, echo=True)
  answer.prompt_scores[:] = [None] * len(prompt)
  choice = Reply(asked, tokenizer, 'm').choice(0, answer)
  told = choice['logprobs']
  assert choice['text'] == whole
  assert told['tokens'][0] == tokenizer.decode_marked(prompt[:1])
  assert told['tokens'][-1] == tokenizer.decode_marked([end])
  assert ''.join(told['tokens'][1:-1]) == whole
  for token, at in zip(told['tokens'][1:-1], told['text_offset'][1:-1], strict=True):
    assert whole[at : at + len(token)] == token
  assert told['text_offset'][-1] == len(whole)
  own = zip(told['tokens'], told['top_logprobs'], strict=True)
  assert all(token in top for token, top in [*own][len(prompt) :])
  streamed = [Reply(asked, tokenizer, 'm').piece(0, each, None) for each in parts]
  texts = [chunk['choices'][0]['text'] for chunk in streamed if chunk]
  assert Reply(asked, tokenizer, 'm').opening(0)['choices'][0]['text'] + ''.join(texts) == whole


@pytest.mark.parametrize('kind', KINDS)
def test_the_bytes_of_a_chat_are_those_of_its_content(tokenizers, kind):
  tokenizer = tokenizers[kind]
  prompt = tokenizer.encode('user: hi\nassistant:')
  ids = tokenizer.encode('x Grüße 東京 😀 é')[1:]
  answer, _ = answered(tokenizer, prompt, ids)
  asked = CompletionRequest([], [prompt], 1, False, False, 1, thinking='')
  choice = ChatReply(asked, tokenizer, 'm').choice(0, answer)
  content = choice['message']['content']
  told = choice['logprobs']['content']
  assert ''.join(each['token'] for each in told if each['bytes'] is not None) == content
  assert b''.join(bytes(each['bytes'] or ()) for each in told) == content.encode()
  assert all(each['top_logprobs'][0]['token'] == each['token'] for each in told)


def test_special_tokens_are_interpreted_and_not_shown(tokenizers):
  tokenizer = tokenizers['byte_level']
  text = f'<think>\nwhy</think>\n\nOk.<|im_end|>{CALL}'
  ids = tokenizer.encode_tokens(text, marked=True).ids.tolist()
  prompt = tokenizer.encode('hi')
  answer, parts = answered(tokenizer, prompt, ids)
  assert answer.text == f'\nwhy\n\nOk.{CALL}'
  assert answer.spelled == text
  plain, tools = (
    CompletionRequest([], [prompt], 1, True, False, None, thinking='', tools=frozenset(names))
    for names in ((), ('f',))
  )
  message = ChatReply(plain, tokenizer, 'm').choice(0, answer)['message']
  assert message == dict(role='assistant', content=f'Ok.{CALL}', reasoning_content='why')
  reply, chunks = ChatReply(tools, tokenizer, 'm'), []
  for each in parts:
    chunks.append(reply.piece(0, each, answer if each is parts[-1] else None))
  deltas = [chunk['choices'][0]['delta'] for chunk in chunks if chunk]
  assert ''.join(delta.get('reasoning_content', '') for delta in deltas) == 'why'
  assert 'tool_calls' not in deltas[-1]  # the call is not the whole content

  episode = types.SimpleNamespace(
    ids=[], append=lambda *given, scores: said.append(given), is_over=False, num_open=0
  )
  said = []
  Actor._said(types.SimpleNamespace(_room=99, _max_turns=1), episode, answer)
  assert said[0][2]['content'] == text


@pytest.mark.parametrize('kind', KINDS)
def test_the_ids_of_prompts_and_answers(tokenizers, kind):
  """They are where vLLM has them, the same in a stream, and nowhere if they are not wanted."""
  tokenizer, rng = tokenizers[kind], random.Random(kind)
  ends = None, tokenizer.special_id('eos_token')
  for end, reply, wanted in itertools.product(ends, (Reply, ChatReply), (True, False)):
    prompt, ids = map(tokenizer.encode, texts(rng, 2))
    answer, parts = answered(tokenizer, prompt, ids, end)
    told = [*ids, *([] if end is None else [end])]
    asked = CompletionRequest([], [prompt], 1, True, False, None, thinking='', ids=wanted)
    whole, stream = reply(asked, tokenizer, 'm').whole([answer]), reply(asked, tokenizer, 'm')
    pieces = [stream.piece(0, each, answer if each is parts[-1] else None) for each in parts]
    chunks = [chunk for chunk in (stream.opening(0), *pieces) if chunk]
    for first, last in ((whole, whole), (chunks[0], chunks[-1])):
      place = first if reply is ChatReply else first['choices'][0]
      assert place.get('prompt_token_ids') == (prompt if wanted else None)
      assert last['choices'][0].get('token_ids') == (told if wanted else None)
    assert 'token_ids' not in str(chunks[1:-1])


def test_requests_take_the_settings_of_the_model():
  usual = Sampling(1.0, repetition_penalty=1.5)
  read = lambda body: _sampling(RequestFields(body, (), {}), usual)
  assert read({}) == usual
  assert read(dict(repetition_penalty=1, temperature=0)) == Sampling()
  assert read(dict(temperature=0)) == Sampling(repetition_penalty=1.5)


def test_what_a_request_says_of_its_answer(tokenizers, monkeypatch):
  """Its tools are what it may call, and the end of its prompt may begin the thinking."""
  tokenizer = tokenizers['byte_level']
  prompt = tokenizer.encode_tokens('hi<think>\n', marked=True).ids.tolist()
  monkeypatch.setattr('paxlite.serving.bodies._with_thinking', lambda inference, _: inference)
  bodies = Bodies(
    types.SimpleNamespace(
      max_length=99, tokenizer=tokenizer, settings=types.SimpleNamespace(served=Sampling(1.0)),
      experiment=types.SimpleNamespace(VOCAB_SIZE=tokenizer.vocab_size), encode=tokenizer.encode,
      encode_chat=lambda messages, tools, special: prompt, ends=lambda chat: [1],
      encoding=types.SimpleNamespace(chat_format=None),
    ),
    RequestLimits(50),
  )  # fmt: skip
  tool = dict(type='function', function=dict(name='f', parameters={}))
  body = dict(messages=[dict(role='user', content='hi')], tools=[tool])
  of = lambda **more: (lambda asked: ({*asked.tools}, asked.thinking))(bodies.chat(body | more))
  assert of() == ({'f'}, '</think>')
  assert of(tool_choice='none') == (set(), '</think>')
  prompt = prompt[:-3]
  assert of() == ({'f'}, '')
  pytest.importorskip('llguidance')
  assert of(response_format=dict(type='json_object')) == (set(), None)
