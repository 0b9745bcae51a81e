"""A real server, asked by OpenAI's own client, by many at a time, and asked to end."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

import pytest

from tests.support import runs
from tests.unit.generation.test_decoding import CONFIG

openai = pytest.importorskip('openai')
httpx = pytest.importorskip('httpx')  # which openai looks for in its threads

TEMPLATE = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:'
SCHEMA = dict(
  type='object', properties=dict(age=dict(type='integer', minimum=0, maximum=99)),
  required=['age'], additionalProperties=False,
)  # fmt: skip


class Server:
  """A process that serves a model."""

  def __init__(self, folder, *flags: str, key: str = ''):
    command = [
      sys.executable, '-m', 'paxlite', 'serve', str(folder), '--port=0',
      '--import=tests.unit.generation.test_decoding', f'CHAT_TEMPLATE={TEMPLATE}', *flags,
    ]  # fmt: skip
    self.log = tempfile.TemporaryFile('w+')  # noqa: SIM115
    self.process = runs.started(
      command, runs.environment() | {'PAXLITE_API_KEY': key}, stdout=subprocess.PIPE,
      stderr=self.log.fileno(),
    )  # fmt: skip
    line = self.process.stdout.readline()
    assert ' answers at ' in line, self.logged()
    self.name, self.url = line.strip().split(' answers at ')
    self.api = openai.OpenAI(base_url=self.url, api_key=key or 'none', max_retries=0)

  def logged(self) -> str:
    self.log.seek(0)
    return self.log.read()

  def complete(self, prompt, **values):
    return self.api.completions.create(model=self.name, prompt=prompt, **values)

  def chat(self, text='And it came to pass', **values):
    messages = [dict(role='user', content=text)]
    return self.api.chat.completions.create(model=self.name, messages=messages, **values)

  def end(self, how=signal.SIGTERM, seconds=60):
    self.process.send_signal(how)
    return self.process.wait(seconds)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('speaker')
  runs.run(folder, config=CONFIG)
  return folder


@pytest.fixture(scope='module')
def server(trained):
  found = Server(trained, '--most_rows=4', '--max_tokens=32')
  yield found
  found.process.kill()
  found.process.wait()


@pytest.mark.slow
def test_chats_and_completions(server):
  assert [m.id for m in server.api.models.list().data] == [server.name]
  assert server.api.models.retrieve(server.name).id == server.name
  answer = server.complete('And it came', max_tokens=5, temperature=0, logprobs=2)
  (choice,) = answer.choices
  assert choice.finish_reason == 'length'
  assert answer.usage.completion_tokens == 5
  assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 5
  assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
  texts = [server.complete('And it', max_tokens=9, seed=4).choices[0].text for _ in range(2)]
  assert texts[0] == texts[1]
  both = server.complete(['And it', 'And he'], max_tokens=9, seed=4, n=2)
  assert [c.index for c in both.choices] == [0, 1, 2, 3]
  assert both.choices[0].text == texts[0] != both.choices[1].text
  chat = server.chat(max_tokens=6, seed=1, logprobs=True, top_logprobs=1)
  assert chat.choices[0].message.role == 'assistant'
  assert len(chat.choices[0].logprobs.content) == 6
  ending = texts[0].strip()[2:5]
  stopped = server.complete('And it', max_tokens=9, seed=4, stop=[ending]).choices[0]
  assert stopped.finish_reason == 'stop'
  assert stopped.text == texts[0].split(ending)[0]


@pytest.mark.slow
def test_a_stream_has_the_same_text(server):
  for values in (dict(), dict(n=2)):
    whole = server.chat(max_tokens=12, seed=7, **values)
    pieces = {c.index: [] for c in whole.choices}
    reasons, usage = {}, None
    stream = server.chat(
      max_tokens=12, seed=7, stream=True, stream_options=dict(include_usage=True), **values
    )
    for chunk in stream:
      usage = chunk.usage or usage
      for c in chunk.choices:
        pieces[c.index].append(c.delta.content or '')
        reasons[c.index] = c.finish_reason or reasons.get(c.index)
    assert {i: ''.join(p) for i, p in pieces.items()} == {
      c.index: c.message.content for c in whole.choices
    }
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert set(reasons.values()) == {'length'}


@pytest.mark.slow
def test_a_schema_is_kept_to(server):
  form = dict(type='json_schema', json_schema=dict(name='age', schema=SCHEMA))
  answer = server.chat(max_tokens=32, seed=2, response_format=form).choices[0]
  assert answer.finish_reason == 'stop'
  assert 0 <= json.loads(answer.message.content)['age'] <= 99


@pytest.mark.slow
@pytest.mark.parametrize(
  ('values', 'status', 'match'),
  [
    (dict(model='other'), 404, "The model 'other' does not exist"),
    (dict(max_tokens=33), 400, 'max_tokens=33 must be from 1 to 32'),
    (dict(temperature=3), 400, 'temperature=3 must be from 0 to 2'),
    (dict(extra_body=dict(tempratur=1)), 400, 'tempratur.*Did you mean temperature'),
    (dict(extra_body=dict(reasoning_effort='low')), 400, 'reasoning_effort is not supported'),
    (dict(messages=[]), 400, '"messages" must be a list'),
    (dict(messages=[dict(role='user', content='word ' * 99)]), 400, 'maximum context length is 64'),
    (
      dict(messages=[dict(role='user', content=[dict(type='image_url')])]),
      400,
      'only ."type": "text", "text": …. is supported',
    ),
    (dict(logit_bias={'99999': 1}), 400, 'has the id 99999'),
    (dict(top_logprobs=2), 400, 'top_logprobs needs logprobs'),
    (dict(tool_choice='required'), 400, 'forcing a call is not supported'),
    (dict(response_format=dict(type='json_schema')), 400, 'schema must be an object'),
    (dict(n=129), 400, 'n=129 must be from 1 to 128'),
    (dict(extra_body=dict(stop_token_ids=[1 << 40])), 400, 'stop_token_ids has the id'),
    (dict(extra_body=dict(stop_token_ids=[3] * 16)), 400, 'at most 16 are possible'),
  ],
)
def test_errors_have_the_form_of_openai(server, values, status, match):
  asked = dict(model=server.name, messages=[dict(role='user', content='a')]) | values
  with pytest.raises(openai.APIStatusError, match=match) as caught:
    server.api.chat.completions.create(**asked)
  assert caught.value.status_code == status
  assert {'message', 'type', 'param', 'code'} == set(caught.value.body)
  assert server.chat(max_tokens=2).choices  # and it goes on


@pytest.mark.slow
def test_what_is_no_request(server):
  import httpx

  post = lambda path, **more: httpx.post(f'{server.url}/{path}', **more)
  assert post('completions', content=b'{').status_code == 400
  assert post('completions', content=b'[1]').json()['error']['message'].endswith('JSON object')
  assert post('completions', content=b' ' * (9 << 20)).status_code == 413
  assert post('nothing').status_code == 404
  assert httpx.get(f'{server.url}/completions').json()['error']['type'] == 'invalid_request_error'


FORM = lambda schema: dict(type='json_schema', json_schema=dict(name='x', schema=schema))
HOSTILE = {
  'half of a surrogate pair': '{"stop": "\\ud800"}',
  'the same in a name': '{"\\ud800": 1}',
  'an endless number': '{"temperature": 1e400}',
  'a long number': f'{{"max_tokens": 1{"0" * 400}}}',
  'lists in a field that changes nothing': f'{{"metadata": [[]{",[]" * 2_600_000}]}}',
  'depth': f'{{"metadata": {"[" * 3000 + "]" * 3000}}}',
  'a giant prompt': json.dumps(dict(messages=[dict(role='user', content='word ' * 1_500_000)])),
  'an end as text': json.dumps(
    dict(response_format=FORM(dict(const='a<|endoftext|>b</s>')), max_tokens=32)
  ),
  'a costly pattern': json.dumps(
    dict(response_format=FORM(dict(type='string', pattern='^(a?){500}a{500}$')), max_tokens=32)
  ),
}


@pytest.mark.slow
def test_no_request_changes_the_answer_of_another_one(server):
  import httpx

  honest = [dict(max_tokens=24, seed=i, text=f'And it came to pass {i}') for i in range(8)]
  said = lambda values: server.chat(**values).choices[0].message.content
  alone = [said(values) for values in honest]
  begin = json.dumps(dict(model=server.name, messages=[dict(role='user', content='a')]))[:-1]

  def ask(fields):
    found = httpx.post(
      f'{server.url}/chat/completions', content=f'{begin}, {fields[1:]}'.encode(), timeout=120
    )
    httpx.get(server.url.replace('/v1', '/health'), timeout=60)
    return found

  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    odd = {name: pool.submit(ask, fields) for name, fields in HOSTILE.items()}
    beside = [*pool.map(said, honest * 2)]
  assert beside == alone * 2
  for name, asked in odd.items():
    found = asked.result()
    choice = found.json().get('choices', [{}])[0]
    if found.status_code == 200 and choice['finish_reason'] == 'stop':
      assert json.loads(choice['message']['content']) == 'a<|endoftext|>b</s>', name
    else:
      assert found.status_code in (200, 400, 413), (name, found.text)
  messages = [dict(role='developer', content='be kind'), dict(role='user', content='a'),
              dict(role='assistant', content=None), dict(role='user', content='b')]  # fmt: skip
  assert server.api.chat.completions.create(model=server.name, messages=messages, max_tokens=2)


@pytest.mark.slow
def test_many_clients_lose_nothing_and_change_nothing(server):
  def ask(i):
    return server.chat(f'number {i % 8} of many', max_tokens=4 + i % 20, seed=i).choices[0]

  alone = [ask(i).message.content for i in range(6)]
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    together = [c.message.content for c in pool.map(ask, range(64))]
  assert together[:6] == alone
  assert all(together)


@pytest.mark.slow
def test_the_harness_scores_by_the_server_as_by_the_checkpoint(server, trained):
  """A text echoed with its log-probabilities is what the harness's own API model asks for."""
  pytest.importorskip('lm_eval')
  from lm_eval.api.instance import Instance

  from paxlite.eval.commands.lm_eval import PaxliteLM

  texts = [('And it came', ' to pass'), ('In the beginning', ' God created the heaven')]
  asked = lambda: [Instance('loglikelihood', {}, pair, i) for i, pair in enumerate(texts)]
  ours = PaxliteLM(str(trained), CHAT_TEMPLATE=TEMPLATE)
  for (context, after), (expected, greedy) in zip(texts, ours.loglikelihood(asked()), strict=True):
    answer = server.complete(context + after, max_tokens=0, echo=True, logprobs=1).choices[0]
    start = next(i for i, at in enumerate(answer.logprobs.text_offset) if at >= len(context))
    found = answer.logprobs.token_logprobs[start:]
    assert abs(sum(found) - expected) < 1e-3
    tops = answer.logprobs.top_logprobs[start:]
    assert all(p >= max(t.values()) for p, t in zip(found, tops, strict=True)) == greedy


class OurTokenizer:
  """The tokenizer of the model, as the harness calls one of transformers."""

  def __init__(self, model):
    self._model = model
    self.eos_token_id = self.bos_token_id = self.pad_token_id = model.eot_token_id
    self.eos_token, self.chat_template = '</s>', None

  def __call__(self, texts, **options):
    encode = self._model.tok_encode
    ids = encode(texts) if isinstance(texts, str) else [encode(text) for text in texts]
    return types.SimpleNamespace(input_ids=ids)

  def encode(self, text, **options):
    return self._model.tok_encode(text)


@pytest.mark.slow
def test_the_api_model_of_the_harness(server, trained, monkeypatch):
  """Its own client for completions gets the numbers and texts that the checkpoint gives."""
  pytest.importorskip('lm_eval')
  import transformers
  from lm_eval.api.instance import Instance
  from lm_eval.models.openai_completions import LocalCompletionsAPI

  from paxlite.eval.commands.lm_eval import PaxliteLM

  ours = PaxliteLM(str(trained), CHAT_TEMPLATE=TEMPLATE)
  monkeypatch.setattr(
    transformers.AutoTokenizer, 'from_pretrained', lambda *args, **values: OurTokenizer(ours)
  )
  theirs = LocalCompletionsAPI(
    base_url=f'{server.url}/completions', model=server.name, tokenizer='ours',
    tokenizer_backend='huggingface', batch_size=2, max_length=ours.max_length,
  )  # fmt: skip
  texts = [
    ('And it came', ' to pass'),
    ('In the beginning', ' God created the heaven'),
    ('A', ' b'),
  ]
  asked = lambda: [Instance('loglikelihood', {}, pair, i) for i, pair in enumerate(texts)]
  expected, found = ours.loglikelihood(asked()), theirs.loglikelihood(asked())
  for (p, greedy), (other, other_greedy) in zip(expected, found, strict=True):
    assert abs(p - other) < 1e-3
    assert greedy == other_greedy
  rule = {'until': ['.'], 'max_gen_toks': 8}
  asked = lambda: [Instance('generate_until', {}, (t, dict(rule)), i) for i, (t, _) in
                   enumerate(texts)]  # fmt: skip
  assert theirs.generate_until(asked()) == ours.generate_until(asked())


@pytest.mark.slow
def test_limits_keys_and_an_orderly_end(trained, tmp_path):
  server = Server(
    trained, '--most_rows=1', '--most_waiting=1', '--max_tokens=48', '--name=mine', key='secret'
  )
  try:
    assert server.name == 'mine'
    with pytest.raises(openai.AuthenticationError, match='API key is missing or wrong'):
      openai.OpenAI(base_url=server.url, api_key='other', max_retries=0).models.list()
    port = int(server.url.rsplit(':', 1)[1].split('/')[0])
    taken = runs.module('paxlite', 'serve', f'--checkpoint={trained}', f'--port={port}', code=None)
    assert taken.returncode == 2
    assert 'cannot listen there' in taken.stderr
    assert len(taken.stderr.splitlines()) == 1
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      asked = [pool.submit(server.chat, max_tokens=48, seed=i) for i in range(8)]
      refused = [f.exception() for f in asked]
    kept = [f for f in asked if f.exception() is None]
    assert kept
    assert {type(e) for e in refused if e is not None} <= {openai.RateLimitError}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      late = pool.submit(server.chat, max_tokens=48, seed=3)
      while not late.done() and json.loads(_health(port))['unanswered'] == 0:
        time.sleep(0.001)
      assert server.end() == 0
      assert late.result().choices[0].finish_reason == 'length'
    with pytest.raises(OSError, match='refused'):
      socket.create_connection(('127.0.0.1', port), 5)
  finally:
    server.process.kill()
    server.process.wait()


def _health(port: int) -> str:
  return httpx.get(f'http://127.0.0.1:{port}/health').text


@pytest.mark.slow
def test_an_answer_that_takes_too_long(trained):
  server = Server(trained, '--timeout=0.001', '--max_tokens=48')
  try:
    with pytest.raises(openai.APIStatusError, match='was not complete after') as caught:
      server.chat(max_tokens=48)
    assert caught.value.status_code == 504
    assert os.path.exists(f'/proc/{server.process.pid}')
    assert server.end(signal.SIGINT) in (0, 130)
  finally:
    server.process.kill()
    server.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_end_while_programs_are_compiled(trained, how):
  command = [sys.executable, '-m', 'paxlite', 'serve', str(trained), '--port=0']
  process = subprocess.Popen(
    [*command, '--import=tests.unit.generation.test_decoding'], cwd=runs.ROOT,
    env=runs.environment(), stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  assert 'Compiling' in process.stderr.readline()
  process.send_signal(how)
  said = process.communicate(timeout=60)[1]
  assert said == 'Told to stop before the first request: nothing was lost\n'
  assert process.returncode == 0


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  ('flags', 'match'),
  [
    (['/nowhere', '--port=0'], '/nowhere'),
    (['x', '--max_tokens=0'], '--max_tokens=0 must be at least 1'),
    (['x', '--port=99999'], 'cannot listen there'),
    (['x', '--host=no.such.host.invalid'], 'cannot listen there'),
    (['x', '--api_key=secret'], 'set PAXLITE_API_KEY, or --api_key_file=FILE'),
  ],
)
def test_bad_arguments_are_one_line(flags, match):
  result = runs.module('paxlite', 'serve', *flags, code=None)
  assert result.returncode == 2
  assert match in result.stderr
  assert len(result.stderr.splitlines()) == 1
