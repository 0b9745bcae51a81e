"""The page of a server: what it may load and run, and how a browser shows what a model writes."""

import base64
import contextlib
import dataclasses
import hashlib
import html.parser
import http.client
import json
import random
import re

import numpy as np
import pytest

pytest.importorskip('uvicorn')

from paxlite.generation.inference import load_checkpoint
from paxlite.serving import api, page
from paxlite.serving.bodies import Bodies, RequestLimits
from paxlite.serving.gate import LOOPBACK
from paxlite.serving.worker import Worker
from tests.support import runs
from tests.support.browser import PROGRAM, browser
from tests.unit.generation.test_decoding import CONFIG
from tests.unit.serving.test_slow_clients import application, served

KEY = 'kéy'


def answered(port, method, path, **headers):
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=30)
  with contextlib.closing(connection):
    connection.request(method, path, headers=headers)
    found = connection.getresponse()
    return found.status, found.headers, found.read()


def test_the_page_and_its_headers():
  with served(application(), ()) as port:
    status, headers, text = answered(port, 'GET', '/')
    assert (status, text) == (200, page.CONTENT)
    assert headers['content-type'] == 'text/html; charset=utf-8'
    assert headers['x-content-type-options'] == 'nosniff'
    policy = headers['content-security-policy']
    given = {name: set(rest) for name, *rest in map(str.split, policy.split(';'))}
    assert given['default-src'] == given['frame-ancestors'] == given['base-uri'] == {"'none'"}
    assert given['connect-src'] == {"'self'"}
    for tag in ('script', 'style'):
      (part,) = re.findall(rf'<{tag}\b[^>]*>(.*?)</{tag}>', text.decode(), re.DOTALL)
      digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
      assert given[f'{tag}-src'] == {f"'sha256-{digest}'"}
    status, headers, text = answered(port, 'HEAD', '/')
    assert (status, text) == (200, b'')
    assert headers['content-length'] == str(len(page.CONTENT))
    assert headers['content-security-policy'] == policy
    assert answered(port, 'POST', '/')[0] == 405
    assert answered(port, 'GET', '/', Host='evil.example')[0] == 403
    for path in ('/page.html', '/x', '/v1', '//'):
      status, headers, text = answered(port, 'GET', path)
      assert status == 404, path
      assert json.loads(text)['error']['type'] == 'invalid_request_error'
      assert 'content-security-policy' not in headers
    assert answered(port, 'GET', '/v1/models')[0] == 401  # the page alone needs no key


def test_a_server_for_machines_has_no_page():
  with served(application(has_page=False), ()) as port:
    assert answered(port, 'GET', '/')[0] == 404
    assert answered(port, 'GET', '/health')[0] == 200


class Elements(html.parser.HTMLParser):
  """Collects elements with their attributes."""

  def __init__(self, text):
    super().__init__()
    self.found = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.found.append((tag, dict(attrs)))


def test_what_the_file_consists_of():
  """It names no address, has no handlers in its markup, and each field has a label."""
  text = page.CONTENT.decode()
  assert not re.search(r'https?:|//[a-z]+\.|@import|url\(', text)
  assert not re.search(
    r'innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(', text
  )
  elements = Elements(text).found
  for tag, attributes in elements:
    assert tag not in ('img', 'link', 'iframe', 'object', 'embed', 'base')
    assert not [name for name in attributes if name.startswith('on') or name in ('style', 'src')]
  labelled = {attributes.get('for') for tag, attributes in elements if tag == 'label'}
  fields = [a['id'] for tag, a in elements if tag in ('input', 'select', 'textarea')]
  within = re.findall(r'<label(?: class="wide")?>[^<]+<\w+ id="(\w+)"', text)
  assert {*fields} == (labelled | {*within}) - {None}


HOSTILE = {
  'image': '<img src=x onerror="window.evil = 1"><svg onload="window.evil = 1">',
  'script': '</script></div><script>window.evil = 1</script><!-- <style>*{display:none}</style>',
  'link': '[a](javascript:window.evil=1) &lt;b&gt; &#x3c; ${window.evil=1} `x` **b**',
  'direction': 'safe \u202etxt.exe\u2066 \u05d0\u05d1 \u200f end',
  'escapes': '\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07 nul\x01',
  'long': 'themselves' * 1000,
  'lines': 'a\r\n\n\n  b\tc\u2028d' + '\n' * 9 + 'e',
}  # fmt: skip
PIECES = [
  *re.findall('.{1,9}', ''.join(text for name, text in HOSTILE.items() if name != 'long')),
  *'<>&"\'`\u200b\u2069😀', '<think>', '</think>', '<!--', '-->', ']]>', '<svg><script>',
]  # fmt: skip
HOSTILE |= {
  f'drawn {i}': 'x' + ''.join(random.Random(i).choices(PIECES, k=40)) + 'y' for i in range(4)
}
THOUGHT = f'<think>\nFirst {HOSTILE["image"]}</think>\n\nThen the answer.'
CALL = dict(name='f', arguments=dict(x=HOSTILE['script'], y=[1, {'z': None}]))
ANSWERS = {
  **HOSTILE,
  'think': THOUGHT,
  'call': f'Wait.<tool_call>{json.dumps(CALL)}</tool_call>',
  'result': 'The result is good.',
}
TEMPLATE = (
  '{{ tools or "" }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls or "" }}\n'
  '{% endfor %}assistant:'
)
TOOLS = [dict(type='function', function=dict(name='f', parameters=dict(type='object')))]


class Words:
  """A Grammar that allows one text: what a model writes that has learned nothing else."""

  def __init__(self, ids, size):
    self._ids, self._size, self._at = ids, size, 0

  def allowed(self):
    return np.arange(self._size) == self._ids[self._at]

  def accept(self, token):
    self._at += 1

  @property
  def is_complete(self):
    return self._at == len(self._ids)

  may_end = False


class SpeakerBodies(Bodies):
  """Reads requests, and lets the model answer with one of ANSWERS where a message names it."""

  def chat(self, body):
    asked = super().chat(body)
    text = ANSWERS.get(body['messages'][-1]['content'])
    if text is None:
      return asked
    inference = self._inference
    words = Words(inference.tokenizer.encode(text), inference.experiment.VOCAB_SIZE)
    requests = [dataclasses.replace(each, grammar=words) for each in asked.requests]
    return dataclasses.replace(asked, requests=requests)


@pytest.fixture(scope='module')
def inference(tmp_path_factory):
  folder = tmp_path_factory.mktemp('speaker')
  runs.run(folder, config=CONFIG)
  return load_checkpoint(
    str(folder), overrides=dict(MAX_SEQ_LEN='4096', CHAT_TEMPLATE=f"'''{TEMPLATE}'''")
  )


@contextlib.contextmanager
def serving(inference, key=''):
  """Serves the model as `paxlite serve` does; yields the port."""
  worker = Worker(inference.engine(most_rows=2, steady=True), 8)
  bodies = SpeakerBodies(inference, RequestLimits(4000))
  name = '<b>speaker</b>'
  found = api.Api(worker, bodies, inference.tokenizer, name, 600.0, key, LOOPBACK)
  worker.start()
  with served(found.application, ()) as port:
    yield port
  worker.stop()


@pytest.fixture(scope='module')
def port(inference):
  with serving(inference) as found:
    yield found


@pytest.fixture(scope='module')
def chromium(tmp_path_factory):
  with browser(tmp_path_factory.mktemp('profile')) as found:
    yield found


@pytest.fixture
def chat(chromium, port):
  """The page of the server, in a browser; at its end, nothing has complained."""
  chromium.problems.clear()
  chromium.sent.clear()
  chromium.look(1200)
  chromium.open(f'http://127.0.0.1:{port}/')
  chromium.until('document.activeElement.id === "message"')
  yield chromium
  assert chromium.problems == []
  assert chromium.run('window.evil') is None
  assert {url.split('/')[2] for url in chromium.sent} == {f'127.0.0.1:{port}'}


needs_chromium = pytest.mark.skipif(PROGRAM is None, reason='needs Chromium')
DONE = 'document.querySelector("article:last-child[aria-busy=false]") !== null'
LAST = 'document.querySelector("article.answer:last-child .text:not(.thinking .text)")'


def say(chat, text):
  """Sends a message, and returns the text of the answer."""
  chat.run('document.getElementById("message").focus()')
  chat.write(text)
  chat.press('Enter')
  return ended(chat)


def ended(chat):
  chat.until(DONE)
  return chat.run(f'{LAST}.textContent')


def put(chat, **fields):
  for name, value in fields.items():
    chat.run(f'document.getElementById({name!r}).value = {json.dumps(value)}')


@pytest.mark.slow
@needs_chromium
def test_a_chat(chat):
  assert chat.run('document.querySelector("h1").textContent') == '<b>speaker</b>'
  put(chat, most='40', temperature='1', seed='7')
  chat.write('a line')
  chat.press('Enter', shift=True)
  chat.write('and another')
  chat.press('Enter')
  chat.until('document.querySelector("article.answer[aria-busy=true]") !== null')
  first = ended(chat)
  given = chat.run('document.querySelector("article.given .text").textContent')
  assert given == 'a line\nand another'
  assert chat.run('document.getElementById("message").value') == ''
  assert 'seed 7 · temperature 1 · cut at the limit of tokens' in chat.run(
    'document.body.innerText'
  )
  assert first.strip() in chat.run('document.getElementById("said").textContent')

  again = 'document.querySelector(".again")'
  chat.click(again)
  assert ended(chat) == first
  assert chat.run('document.activeElement.id') == 'message'
  put(chat, seed='8')
  chat.click(again)
  other = ended(chat)
  assert other != first
  put(chat, seed='')
  chat.click(again)
  drawn = ended(chat)
  seed = chat.run('/seed (\\d+)/.exec(document.body.innerText)[1]')
  assert drawn not in (first, other)
  put(chat, seed=seed)
  chat.click(again)
  assert ended(chat) == drawn
  assert chat.run('document.querySelectorAll("article").length') == 2

  assert say(chat, 'more')
  assert chat.run('document.querySelectorAll("article").length') == 4
  assert chat.run('document.querySelectorAll(".again").length') == 1
  chat.click('document.getElementById("clear")')
  assert chat.run('document.querySelectorAll("article").length') == 0


@pytest.mark.slow
@needs_chromium
def test_an_answer_is_stopped(chat, port):
  put(chat, temperature='1', seed='1')
  button = lambda name: chat.click(f'document.getElementById({name!r})')
  ways = [
    (lambda: chat.press('Enter'), lambda: chat.press('Escape')),
    (lambda: button('send'), lambda: button('stop')),
    (lambda: button('send'), lambda: chat.press('Enter')),
  ]  # the focus is on Stop
  for send, stop in ways:
    chat.run('document.getElementById("message").focus()')
    chat.write('Tell me')
    send()
    shown = chat.until(f'{LAST}?.textContent.length > 20 && {LAST}.textContent')
    assert len(shown) < 4000
    stop()
    text = ended(chat)
    assert text.startswith(shown)
    assert 'stopped · seed 1' in chat.run('document.querySelector("article:last-child").innerText')
    health = 'fetch("/health").then(r => r.json()).then(r => r.active + r.unanswered === 0)'
    chat.until(health)  # the server has given it up, too
    assert ended(chat) == text
    assert chat.run('document.activeElement.id') == 'message'
  assert len(say(chat, 'image')) > 10  # and the conversation goes on


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize('name', HOSTILE)
def test_the_text_of_a_model_is_text(chat, name):
  before = chat.run('document.querySelectorAll("body *").length')
  assert say(chat, name).strip() == HOSTILE[name].strip()
  tags = chat.run('[...new Set([...document.querySelectorAll("main *")].map(e => e.localName))]')
  known = {'article', 'h2', 'div', 'details', 'summary', 'footer', 'p', 'button', 'span'}
  assert {*tags} <= known
  assert chat.run('document.querySelectorAll("body *").length') > before
  for width in (360, 1200):
    chat.look(width)
    assert chat.run('document.documentElement.scrollWidth') <= width
  box = chat.run(f'(r => [r.left, r.right])({LAST}.getBoundingClientRect())')
  assert box[0] >= 0
  assert box[1] <= 1200


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(
  'name', [name for name in HOSTILE if not re.search('[\r\u2028]', HOSTILE[name])]
)
def test_the_text_of_a_person_is_text(chat, name):
  put(chat, most='4')
  say(chat, f'{HOSTILE[name]}!')
  given = chat.run('document.querySelector("article.given .text").textContent')
  assert given == f'{HOSTILE[name]}!'


@pytest.mark.slow
@needs_chromium
def test_all_is_named_and_reached_by_keys(chat):
  say(chat, 'think')
  chat.run('for (const each of document.querySelectorAll("details")) each.open = true')
  chat.until('document.querySelectorAll(".list").length === 2')
  chat.look(360)
  assert chat.run('document.documentElement.scrollWidth') <= 360
  nodes = chat.call('Accessibility.getFullAXTree')['nodes']
  is_focusable = lambda node: any(p['name'] == 'focusable' for p in node.get('properties', ()))
  nodes = [n for n in nodes if is_focusable(n) and n['role']['value'] != 'RootWebArea']
  assert len(nodes) >= 17
  assert all(node['name']['value'] for node in nodes)
  chat.run('document.activeElement.blur(); window.met = new Set()')
  for _ in range(len(nodes) + 4):
    chat.press('Tab')
    chat.run('met.add(document.activeElement)')
  every = '"a, button, input, select, textarea, summary, [tabindex]"'
  assert (
    chat.run(
      f'[...document.querySelectorAll({every})].filter(e => e.checkVisibility() && !met.has(e))'
      '.map(e => e.outerHTML)'
    )
    == []
  )


@pytest.mark.slow
@needs_chromium
def test_thinking_is_folded(chat):
  assert say(chat, 'think') == 'Then the answer.'
  thinking = 'document.querySelector(".thinking")'
  assert chat.run(f'{thinking}.open') is False
  assert chat.run(f'{thinking}.querySelector(".text").textContent') == THOUGHT[8:-26]
  assert 'onerror' not in chat.run('document.querySelector("main").innerText')
  chat.click(f'{thinking}.querySelector("summary")')
  assert 'onerror' in chat.run('document.querySelector("main").innerText')
  assert chat.run(f'{thinking}.querySelectorAll(".token").length') > 5


@pytest.mark.slow
@needs_chromium
def test_calls_of_tools_and_their_results(chat):
  put(chat, tools='[1')
  say(chat, 'call')
  assert 'Tools: ' in chat.run('document.querySelector(".wrong").textContent')
  assert chat.run('document.getElementById("message").value') == 'call'
  put(chat, tools=json.dumps(TOOLS), message='')
  assert say(chat, 'call').strip() == 'Wait.'
  shown = chat.run('document.querySelector(".call pre").textContent')
  assert json.loads(shown) == CALL['arguments']
  assert '\n  "y": [\n' in shown
  assert chat.run('document.getElementById("asks").textContent') == 'Result of f'
  assert say(chat, 'result').strip() == ANSWERS['result']
  assert chat.run('document.getElementById("asks").textContent') == 'Message'


@pytest.mark.slow
@needs_chromium
def test_tokens_and_their_probabilities(chat):
  text = say(chat, 'image')
  assert chat.run(f'[...{LAST}.children].every(e => e.className === "token")')
  chat.point(f'{LAST}.children[3]')
  tip = 'document.getElementById("tip")'
  assert chat.run(f'{tip}.hidden') is False
  shares = chat.run(f'[...{tip}.querySelectorAll("li span:last-child")].map(e => e.textContent)')
  assert len(shares) in (5, 6)
  assert all(re.fullmatch(r'< 0\.01 %|[\d.e-]+ %', share) for share in shares)
  chosen = chat.run(f'{tip}.querySelector(".chosen span").textContent')
  assert chosen == f'“{chat.run(f"{LAST}.children[3].textContent")}”'
  chat.run(f'{LAST}.focus()')
  for key in ('ArrowRight', 'ArrowRight', 'ArrowLeft'):
    chat.press(key)
  now = chat.run(f'[...{LAST}.children].findIndex(e => e.matches(".now"))')
  assert now == 4
  chat.press('Escape')
  assert chat.run(f'{tip}.hidden') is True
  chat.click('document.querySelector(".tokens summary")')
  prompt, answer = chat.until(
    '(l => l.length === 2 && l.map(e => e.textContent))([...document.querySelectorAll(".list")])'
  )
  assert prompt == 'user: image↵assistant:'
  assert answer == text
  scores = 'document.querySelectorAll(".list")[0].querySelectorAll("[style]").length'
  assert chat.run(scores) == chat.run(scores.replace('[style]', '.token')) - 1  # all but the first


@pytest.mark.slow
@needs_chromium
def test_a_plain_text(chat):
  put(chat, form='plain', most='12', seed='3', temperature='1')
  text = say(chat, 'And it came')
  assert text
  assert chat.run(f'{LAST}.querySelectorAll(".token").length') > 5
  chat.click('document.querySelector(".tokens summary")')
  lists = '[...document.querySelectorAll(".list")].map(e => e.textContent)'
  chat.until(f'{lists}.length === 2')
  assert chat.run(lists)[0] == '<s>And it came'


@pytest.mark.slow
@needs_chromium
def test_errors_are_said_and_nothing_is_lost(chat):
  put(chat, most='5000')
  say(chat, 'image')
  assert 'max_tokens=5000 must be' in chat.run('document.querySelector(".wrong").textContent')
  assert chat.run('document.getElementById("message").value') == 'image'
  put(chat, most='0', message='')
  chat.write('image')
  chat.press('Enter')
  assert chat.run('document.getElementById("settings").open') is True
  assert chat.run('document.querySelectorAll("article").length') == 2
  put(chat, most='', message='')
  assert say(chat, 'image').strip() == HOSTILE['image']
  problems, chat.problems = chat.problems, []
  assert all('400 (Bad Request)' in each for each in problems)
  assert len(problems) == 1


@pytest.mark.slow
@needs_chromium
def test_a_key_is_asked_for_and_not_kept(chromium, inference):
  with serving(inference, KEY) as port:
    chromium.open(f'http://127.0.0.1:{port}/')
    for key in ('wrong', KEY):
      chromium.until('document.activeElement.id === "key"')
      assert chromium.run('document.getElementById("compose").hidden') is True
      chromium.write(key)
      chromium.press('Enter')
      chromium.until(f'document.activeElement.id === {"message" if key == KEY else "key"!r}')
    assert say(chromium, 'image').strip() == HOSTILE['image']
    kept = 'JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])'
    assert chromium.run(kept) == '[{},{},""]'
    chromium.open(f'http://127.0.0.1:{port}/')
    chromium.until('document.activeElement.id === "key"')
