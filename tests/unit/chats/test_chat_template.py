"""Chat templates: the same texts as transformers, and the limits of what a template may cost."""

import itertools
import json
import re

import pytest

from paxlite.chats import budget
from paxlite.chats.chat_format import ChatFormat
from paxlite.core.errors import UserError
from tests.support.fuzzing import limits

pytest.importorskip('jinja2')

MESSAGES = [
  {'role': 'system', 'content': 'Be <brief> & "kind".'},
  {'role': 'user', 'content': 'Wie heißt\ndie Hauptstadt? '},
  {'role': 'assistant', 'content': ' Paris\n'},
  {'role': 'user', 'content': 'Und {{ 1 }} 日本?'},
]
HONEST = {
  'chatml': """{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
  'llama': """{%- set ns = namespace(system='', n=0) -%}
{%- if messages[0]['role'] == 'system' -%}
  {%- set ns.system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}
  {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate user/assistant') -}}
  {%- endif -%}
  {%- set content = ns.system + message.content if loop.first else message.content -%}
  {%- if message.role == 'user' -%}{{- bos_token ~ '[INST] ' ~ content.strip() ~ ' [/INST]' -}}
  {%- else -%}{{- ' ' ~ content.strip() ~ ' ' ~ eos_token -}}{%- endif -%}
  {%- set ns.n = ns.n + 1 -%}
{%- endfor -%}
{{- ns.n * 2 }} {{ '%05d|%s' % (ns.n, 'x') }} {{ '{:>6}{}'.format(ns.n, 'y') }}""",
  'macros': """{%- macro one(m, last=false) -%}
  {{- '<' ~ m.role | upper ~ '>' ~ (m.content | replace('\n', ' ') | indent(2)) -}}
  {%- if not last and caller is defined %}{{ caller() }}{% endif -%}
{%- endmacro -%}
{%- for m in messages if m.role != 'system' and m.content -%}
  {%- call one(m, loop.last) %};{% endcall -%}
{%- else -%}none{%- endfor -%}
{%- set text -%}{%- for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor -%}{%- endset -%}
{{ text | length }} {{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | map('trim') | list }}
{{ range(3) | list }} {{ {'a': 1}.items() | list }} {{ 'a,b'.split(',')[-1] }} {{ 7 // 2 ** 1 }}
{% for key, value in dict(b=1, a=[1, 2]) | dictsort %}{{ key }}={{ value }} {% endfor %}
{{ [1, 2] + [3] }} {{ 'ab' * 3 }} {{ 3.14159 | round(2) }} 
{{ ['b', 'a'] | sort | first | title }}
{{ (messages | first).content | safe }} {{ 'x' if messages[9] is undefined else 'y' }}
{% filter upper %}q{% endfilter %}{{ undefined_thing }}
{{ none is none }}{{ 'role' in messages[0] }}""",
  'json': """{{ messages[0] | tojson }} {{ messages | tojson(indent=2) }}
{{ {'b': 'ß', 'a': '<'} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}""",
  'generation': """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}
{% set answer = m.content %}{{ answer }}<end>
{%- endgeneration %}
{{ answer }}{% else %}{{ m.role }}: {{ m.content }}
{% endif %}
{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}""",
  'date': "{{ strftime_now('%Y') }}{% if tools is not none %}tools{% endif %}{{ documents }}",
  'recursive': """{% for m in [{'c': [{'c': [], 'n': 1}, {'c': [], 'n': 2}], 'n': 0}] recursive %}
{{ m.n }}{{ loop(m.c) }}{{ loop.depth }}{% endfor %}
{% block b %}[{{ messages | length }}]{% endblock %}
{{ self.b() }}{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}""",
}  # fmt: skip


def chat(tmp_path, template, **configuration) -> ChatFormat:
  tokens = {'bos_token': '<s>', 'eos_token': {'content': '</s>'}}
  path = tmp_path / 'tokenizer_config.json'
  path.write_text(json.dumps(tokens | {'chat_template': template} | configuration))
  return ChatFormat('', str(tmp_path / 'tokenizer.json'))


@pytest.mark.parametrize('name', HONEST)
@pytest.mark.parametrize('prompt', [False, True])
def test_texts_are_those_of_transformers(tmp_path, name, prompt):
  utils = pytest.importorskip('transformers.utils.chat_template_utils')
  (theirs,), _ = utils.render_jinja_template(
    [MESSAGES], chat_template=HONEST[name], add_generation_prompt=prompt, bos_token='<s>',
    eos_token='</s>',
  )  # fmt: skip
  assert chat(tmp_path, HONEST[name]).render(MESSAGES, prompt) == theirs


def test_a_list_of_templates_has_a_default(tmp_path):
  """transformers 4 wrote several templates in this form."""
  named = [{'name': 'tool_use', 'template': 'tools'}, {'name': 'default', 'template': 'plain'}]
  assert chat(tmp_path, named).render(MESSAGES, False) == 'plain'
  assert chat(tmp_path, {'default': 'plain'}).render(MESSAGES, False) == 'plain'


@pytest.mark.parametrize(
  ('template', 'match'),
  [
    ([{'template': 'x'}], 'must be a string, or a list of'),
    ([{'name': 'default', 'template': 5}], 'must be a string, or a list of'),
    (['x'], 'must be a string, or a list of'),
    ([{'name': ['x'], 'template': 'x'}], 'must be a string, or a list of'),
    ([{'name': 'a', 'template': 'x'}], r'no template named default \(its names: a\)'),
    ([], r'no template named default \(its names: none\)'),
    ({'default': 5}, 'no template named default'),
    (5, 'has no chat template'),
    ('x' * 300_000, '300,000 characters'),
    ('{% for %}', 'not a valid Jinja template'),
    ('{{ 1 | urlize }}', 'not a valid Jinja template: No filter named'),
    ('{{ ' + '(' * 100_000, 'not a valid Jinja template'),
    ('{% if 1 %}' * 20_000, 'not a valid Jinja template'),
    ('{% if 1 %}' * 150 + '{% endif %}' * 150, 'not a valid Jinja template'),
    ('{% for a in b %}' * 30 + '{% endfor %}' * 30, 'not a valid Jinja template'),
    ('{% autoescape true %}{% endautoescape %}', 'not HTML'),
  ],
)
def test_templates_that_are_none(tmp_path, template, match):
  with pytest.raises(UserError, match=match):
    chat(tmp_path, template)


def test_a_name_of_no_file_is_no_template(tmp_path):
  with pytest.raises(
    UserError, match="CHAT_TEMPLATE='t2' is neither a template nor the name of a file"
  ):
    ChatFormat('t2', str(tmp_path))


def test_a_template_that_is_not_utf_8(tmp_path):
  (tmp_path / 'chat_template.jinja').write_bytes(b'{{ "\xff" }}')
  with pytest.raises(UserError, match=r'chat_template\.jinja:1 is not UTF-8'):
    chat(tmp_path, 'x')


FAILING = [
  '{{ 1 + "a" }}', '{{ 1 / 0 }}', '{{ range(1000000) }}', '{{ 2.0 ** 100000 }}', '{{ none.a.b }}',
  '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}', '{{ [1, "a"] | sort }}', '{{ messages.x() }}',
  '{% include "x" %}', '{% extends "x" %}', '{{ "%d" % "x" }}', '{{ "{}".format() }}',
  '{{ "a".encode() }}', '{{ "a".translate({}) }}', '{{ (1).to_bytes(9) }}', '{{ lipsum() }}',
  '{{ messages.append(1) }}', '{{ raise_exception(5) }}', '{{ {[]: 1} }}', '{{ "".__class__() }}',
  '{{ messages | tojson(indent={}) }}', '{{ cycler()() }}', '{{ ("x" | attr("join"))(1) }}',
  '{{ "x".format_map(1, 2) }}', '{{ "\\ud800" }}', '{{ "a".join(5) }}', '{{ 1 | round("x") }}',
  '{{ "".format.__globals__.x }}', '{{ range | list }}', '{{ [].sort() }}', '{{ namespace(1) }}',
  '{{ "{0.__class__.x}".format(1) }}', '{{ range(9)() }}', '{{ (messages | map("x") | list)() }}',
]  # fmt: skip

LONG = '{% set x = "x" * 9999999 %}{% for i in range(99999) %}'
COSTLY = [
  '{{ "x" * 5000000000 }}',
  '{{ 5000000000 * "x" }}',
  '{{ [1] * 5000000000 }}',
  '{{ 9 ** (9 ** 9) }}',
  '{{ 9 ** (9 ** (9 ** 9)) }}',
  '{{ (9 ** 1200) * (9 ** 1200) }}',
  '{{ ("f" * 100000) | int(base=16) // 3 }}',
  '{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}',
  '{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = n.x - -n.x %}{% endfor %}',
  '{{ 5 | round(-999999999) }}',
  '{{ 5 | round(999999999, "floor") }}',
  '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}',
  '{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}',
  '{% for i in range(99999) %}{% if range(99999) | select("none") | list %}{% endif %}{% endfor %}',
  '{% for i in range(99999) %}{% if "x" in range(99999) %}{% endif %}{% endfor %}',
  '{% for i in range(99999) %}' + 'x' * 200000 + '{% endfor %}',
  '{% for i in range(99999) %}{{ strftime_now("%c" * 9999) }}{% endfor %}',
  LONG + '{% if "y" in x %}{% endif %}{% endfor %}',
  LONG + '{% if x[1:] %}{% endif %}{% endfor %}',
  LONG + '{% if x == x ~ "" %}{% endif %}{% endfor %}',
  LONG + '{% if x is eq(x) %}{% endif %}{% endfor %}',
  LONG + '{% if x.count("y") %}{% endif %}{% endfor %}',
  LONG + '{% if x | upper %}{% endif %}{% endfor %}',
  LONG + '{{ x }}{% endfor %}',
  '{{ ("x\n" * 999999) | indent(10000) }}',
  '{{ ("x\n" * 999999) | indent("y" * 10000) }}',
  '{{ "x" | center(9999999999) }}',
  '{{ "x".ljust(9999999999) }}',
  '{{ "x".zfill(9999999999) }}',
  '{{ ("x" * 999999).replace("", "y" * 999999) }}',
  '{{ ("x" * 999999) | replace("x", "y" * 9999) }}',
  '{{ ("y" * 999999).join(range(99999) | map("string")) }}',
  '{{ range(99999) | join("y" * 999999) }}',
  '{{ ("a " * 9999999).split() | length }}',
  '{{ "%9999999999d" % 1 }}',
  '{{ "%*d" % (9999999999, 1) }}',
  '{{ "%.9999999999f" % 1 }}',
  '{{ "%99999999999s" | format(1) }}',
  '{{ "{:9999999999}".format(1) }}',
  '{{ "{:{}}".format(1, 9999999999) }}',
  '{{ "{a:{b}}".format_map({"a": 1, "b": 9999999999}) }}',
  '{{ ("{0}" * 99999).format("x" * 99999) }}',
  '{{ [1] | batch(9999999999, "x") | list }}',
  '{{ [1] | slice(9999999999) | list }}',
  '{{ [[1]] | tojson(indent=9999999999) }}',
  '{{ [1, 2] | tojson(indent="x" * 99999) }}',
  '{{ [1, 2] | tojson(separators=("x" * 9999999, "y")) }}',
  '{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(60) }}',
  ''.join(
    f'{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}'
    for i in range(50)
  )
  + '{% block b50 %}{% endblock %}',
]
STEPS = [
  'x + x', 'x ~ x', 'x * 2', 'x.replace("x", "xx")', '[x, x] | join', '"%s%s" % (x, x)',
  '[x, x] | string', '"{0}{0}".format(x)', '[x, x] | tojson', 'x | replace("x", "xx")',
  '((x ~ x) | e) ~ ""', '([x] * 2) | string', '"%(a)s%(a)s" | format(a=x)', '"".join([x, x])',
  '[x, x] | map("string") | join', '(x ~ "<") | urlencode ~ x',
  '[[x ~ x], []] | sum(start=[]) | join',
]  # fmt: skip
DAGS = ['[x, x]', '(x, x)', 'dict(a=x, b=x)', '{"a": x, "b": x}', 'namespace(a=x, b=x)']
READERS = [
  '{{ x }}', '{{ x ~ "" }}', '{{ x == [x] }}', '{{ 1 in [x] }}', '{{ x | string }}',
  '{{ [x] | e }}',
  '{{ x is eq(1) }}', '{{ "%s" % (x,) }}', '{{ "{}".format(x) }}', '{{ [x] | join }}',
  '{{ [x] | unique | list }}', '{{ [x].index(x ~ "") }}', '{{ {(x,): 1} }}', '{{ x | trim }}',
  '{{ ["a"] | map("replace", "a", x) | list }}',
]  # fmt: skip
COSTLY += ['{% set x = "xxxxxxxx" %}' + f'{{% set x = {step} %}}' * 60 for step in STEPS]
COSTLY += ['{% set x %}xx{% endset %}' + '{% set x %}{{ x }}{{ x }}{% endset %}' * 60]
GROWN = ['{% set x = [1] %}' + f'{{% set x = {d} %}}' * 60 for d in DAGS]
COSTLY += [x + r for x, r in zip(itertools.cycle(GROWN), READERS)]
OTHERS = [x + r for x in GROWN for r in READERS if x + r not in COSTLY]
COSTLY += [pytest.param(x, marks=pytest.mark.slow) for x in OTHERS]
COSTLY += [
  '{% set n = namespace(x="x") %}{% for i in range(999) %}{% set n.x = n.x ~ n.x %}{% endfor %}',
  '{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [1] %}{% endfor %}',
  '{% set x = namespace() %}{% set x.x = x %}{{ [x] | string }}',
]


@pytest.mark.parametrize('template', FAILING)
def test_whatever_a_template_raises_is_one_clear_error(tmp_path, template):
  with pytest.raises(UserError, match='the chat template'):
    print(chat(tmp_path, template).render(MESSAGES, True))


@pytest.mark.cases(fast=15, slow=15)
@pytest.mark.parametrize('template', COSTLY)
def test_a_template_costs_no_more_than_its_budget(tmp_path, template, monkeypatch):
  """Memory is measured; time is counted in steps and characters, so that a hang is noticed."""
  monkeypatch.setattr('paxlite.chats.chat_format.BUDGET', budget.BUDGET // 8)
  monkeypatch.setattr(budget, 'BUDGET', budget.BUDGET // 8)
  made = chat(tmp_path, template)
  with limits(), pytest.raises(UserError, match='cannot write these messages: it ') as error:
    made.render(MESSAGES, True)
  assert re.search(r'far more than a conversation|bits$|places$|indents by more', str(error.value))


def _arguments(method):
  """Returns arguments that a method of a text takes, as a template writes them."""
  for given, written in (('b',), 'y'), ((), ''), ((5,), '9999'), (('b', ''), 'y, ""'):
    try:
      getattr('b', method)(*given)
    except TypeError:
      continue
    return written
  return 'x=1'  # of format_map


# of y, nearly all is compared at every place of x; z has one of the letters of x, as the last one
CALLS = [f'x.{name}({_arguments(name)})' for name in sorted(budget.METHODS[str])]
CALLS += ['x.split(sep=y)', 'x.rsplit(sep=y)', 'x.strip(z)', 'x.lstrip(z)', 'x.rstrip(z)']
CALLS += ['x | trim(z)', 'x | replace(y, "")', 'y in x', 'y is in(x)', 'x < y in x']
LENGTHS = (2_400, 600), (29_000, 48), (200_000, 50_000)  # of x, and of half of y
SEARCHES = [x for x in CALLS if re.search(r'find|index|part|split|strip|repl|count|trim|in\b', x)]
DRAWN = [*zip(CALLS, itertools.cycle(LENGTHS), strict=False)]
DRAWN += [pair for pair in itertools.product(SEARCHES, LENGTHS) if pair not in DRAWN]


@pytest.mark.parametrize(('call', 'lengths'), DRAWN)
def test_every_search_is_paid_for(tmp_path, call, lengths, monkeypatch):
  """A rendering ends within seconds of the processor, whatever a template looks for."""
  monkeypatch.setattr('paxlite.chats.chat_format.BUDGET', budget.BUDGET // 8)
  monkeypatch.setattr(budget, 'BUDGET', budget.BUDGET // 8)
  long, half = lengths
  values = f'x = "a" * {long}', f'y = "a" * {half} ~ "b" ~ "a" * {half}', f'z = "b" * {half} ~ "a"'
  template = ''.join(f'{{% set {value} %}}' for value in values)
  template += f'{{% for i in range(99999) %}}{{% if {call} %}}{{% endif %}}{{% endfor %}}'
  with limits(), pytest.raises(UserError, match='the chat template'):
    chat(tmp_path, template).render(MESSAGES, True)


def test_a_long_conversation_is_far_within_the_budget(tmp_path):
  """It has a thousand messages of 2,000 characters, and every kind of work that templates do."""
  made = chat(tmp_path, HONEST['macros'])
  conversation = [{'role': 'user', 'content': 'word ' * 400}] * 1000
  assert len(made.render(conversation, True)) > 2_000_000
  assert made._budget.left > budget.BUDGET // 2
  for name in HONEST:
    made = chat(tmp_path, HONEST[name])
    made.render(MESSAGES, True)
    assert made._budget.left > budget.BUDGET * 0.999, name


def test_what_values_cost():
  """A character costs 1, a list element _ELEMENT, a dictionary entry 2 _ELEMENT; costs add up."""
  size, element = budget.Budget().size, budget._ELEMENT
  assert size('abc') == 3
  assert size(None) == size(True) == size(1.5) == 0
  assert size(range(1000)) == 1000 * element
  assert size(['ab', 'c']) == 2 * element + 3
  assert size({'key': ['ab']}) == 2 * element + len('key') + element + len('ab')
