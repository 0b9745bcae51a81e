"""Formats of records for fine-tuning, and conversations with tools as transformers writes them."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paxlite.chats.chat_format import ChatFormat, check_says_messages
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import FORMATS, Pair, check_unread, format_of
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.data import packaged
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats.sft import AnswerRows, SftRows
from paxlite.finetuning.preferences.preference_rows import PreferenceRows

pytest.importorskip('jinja2')

# The layout that Hermes began and Qwen has: tools in the system message, results from the user.
WITH_TOOLS = """{%- if tools %}
  {{- '<|im_start|>system\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
  {{- '<tools>' }}
  {%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}
  {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '<|im_start|>user\n' ~ message.content ~ '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' ~ message.content }}
    {%- for tool_call in message.tool_calls or [] %}
      {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
      {%- set call = tool_call.function %}
      {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
      {{- (call.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
MARKED = (
  '{% for m in messages %}{{ m.role }}: {% if m.role == "assistant" %}'
  '{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}'
  '\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}'
)
# Leaves out roles that it does not know, as many templates do.
WITHOUT_TOOLS = """{% for m in messages %}{% if m.role != 'tool' %}
[{{ m.role }}] {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""

USER, ANSWER = {'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': 'good day'}
ARGUMENTS = {'city': 'Zürich', 'days': 2}
CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': ARGUMENTS}}
CALLING = {'role': 'assistant', 'content': '', 'tool_calls': [CALL]}
RESULT = {'role': 'tool', 'content': '{"sky": "clear"}'}
TOOL = {'name': 'weather', 'description': 'of a city', 'parameters': {'type': 'object'}}
WRAPPED = [{'type': 'function', 'function': TOOL}]
WHOLE = [{'role': 'system', 'content': 'be kind'}, USER, CALLING, RESULT, ANSWER]


def turns(*pairs):
  return [{'from': speaker, 'value': value} for speaker, value in pairs]


@pytest.mark.parametrize(
  ('record', 'contents'),
  [
    (dict(inputs='a', targets='b', messages=None), Pair('a', 'b')),
    (dict(prompt='a', completion='b'), Pair('a', 'b')),
    (dict(prompt=[USER, ANSWER, USER], completion=[ANSWER]),
     Conversation([USER, ANSWER, USER, ANSWER], None, 3)),
    (dict(messages=WHOLE, tools=WRAPPED), Conversation(WHOLE, WRAPPED)),
    (dict(messages=WHOLE, tools=json.dumps([TOOL])), Conversation(WHOLE, WRAPPED)),
    (dict(messages=[USER, {**ANSWER, 'tool_calls': None}], tools=[]), Conversation([USER, ANSWER])),
    (dict(messages=[USER, dict(role='assistant', content=None, tool_calls=[
        dict(id='1', function=dict(name='weather', arguments=json.dumps(ARGUMENTS)))])]),
     Conversation([USER, {**CALLING, 'tool_calls': [{'id': '1', **CALL}]}])),
    (dict(messages=[USER, dict(role='assistant', function_call=CALL['function']),
                    dict(role='function', name='weather', content='1')]),
     Conversation([USER, CALLING, dict(role='tool', name='weather', content='1')])),
    (dict(conversations=turns(('system', 'be kind'), ('human', 'hello'),
        ('function_call', json.dumps(CALL['function'])), ('observation', RESULT['content']),
        ('gpt', 'good day')), tools=json.dumps([TOOL])), Conversation(WHOLE, WRAPPED)),
    (dict(conversations=turns(('human', 'hello'), ('gpt', 'good day')), system='be kind'),
     Conversation([WHOLE[0], USER, ANSWER])),
    (dict(messages=[dict(role='user', content=[dict(type='text', text='hel'), dict(text='lo')]),
                    ANSWER]), Conversation([USER, ANSWER])),
    (dict(instruction='hello', input=None, output='good day', history=[]),
     Conversation([USER, ANSWER])),
  ],
)  # fmt: skip
def test_each_format_is_found_by_its_keys(record, contents):
  assert format_of(Fields(record)).read(Fields(record)) == contents


def test_a_record_of_no_format_names_its_keys_and_all_formats():
  with pytest.raises(UserError, match=r'\(question, answer\)') as e:
    format_of(Fields({'question': 'a', 'answer': 'b', 'messages': None}))
  for found in FORMATS:
    assert ' and '.join(found.keys) in str(e.value)


@pytest.mark.parametrize(
  ('record', 'match'),
  [
    (dict(prompt=[USER], completion='b'), 'must be two strings, or two lists of messages'),
    (dict(inputs='a', targets=3), "'targets' must be a string"),
    (dict(messages=[dict(role='user', content=[{'type': 'image'}])]), "a part of type 'image' in"),
    (dict(messages=[dict(role='user', content=3)]), 'of the user has no text'),
    (dict(messages=[{**USER, 'tool_calls': [CALL]}]), 'in a message of the assistant'),
    (dict(messages=[{**CALLING, 'tool_calls': [dict(name='f', arguments='{')]}]), 'is not valid'),
    (dict(messages=[{**CALLING, 'tool_calls': [dict(name='f', arguments='3')]}]), 'a tool call'),
    (dict(messages=[{**CALLING, 'tool_calls': [3]}]), 'a tool call must be'),
    (dict(messages=[USER], tools='['), '"tools" is not valid JSON'),
    (dict(messages=[USER], tools=[dict(x=1)]), '"tools" must be a list of'),
    (dict(conversations=turns(('function_call', 'f(x)'))), 'must be the JSON text of'),
    (dict(conversations=turns(('bot', 'x'))), "the role 'bot': rename it to one of system, user"),
    (dict(instruction='a', output='b', history=['a', 'b']), '"history" must be a list of'),
  ],
)  # fmt: skip
def test_a_bad_record_is_refused(record, match):
  with pytest.raises(UserError, match=match):
    SftRows.contents_of(Fields(record))


PLAIN = (
  '{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}'
  '{% if add_generation_prompt %}[assistant]\n{% endif %}'
)
CHAT = lambda i: [
  {'role': 'user', 'content': f'hello {i}'},
  {'role': 'assistant', 'content': f'good day {i} ' * (i % 7 + 1)},
]
# Records, and the checksums of their tokens and masks, which are the same where their parts are
# encoded apart: no token of this template holds the end of one part and a piece of the next.
AS_BEFORE = {
  'messages': (lambda i: {'messages': [{'role': 'system', 'content': 's'}, *CHAT(i)]}, 933368744),
  'a prompt and its answer': (
    lambda i: {'inputs': f'{i} is', 'targets': ' word' * (i % 9 + 1)},
    1506018244,
  ),
  'ShareGPT': (
    lambda i: {
      'conversations': turns(('system', 'x'), ('human', f'q{i}'), ('gpt', 'v ' * (i % 5 + 1)))
    },
    1100191899,
  ),
  'ShareGPT of messages': (lambda i: {'conversations': CHAT(i)}, 521317572),
  'Alpaca': (
    lambda i: {
      'instruction': f'do {i}', 'input': '' if i % 2 else 'this', 'output': f'done {i}',
      'system': 'sys' if i % 3 else '',
    },
    1051357884,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', AS_BEFORE)
def test_tokens_and_masks_are_what_they_were(tmp_path, name):
  record, checksum = AS_BEFORE[name]
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps(record(i)) + '\n' for i in range(50)))
  rows = SftRows([str(path)], packaged.VOCAB, 96, 8192, chat_template=PLAIN)
  assert rows.tokens_fingerprint == checksum


@pytest.mark.parametrize('tools', [None, WRAPPED])
@pytest.mark.parametrize('prompt', [False, True])
def test_calls_and_results_are_written_as_by_transformers(tools, prompt):
  transformers = pytest.importorskip('transformers')
  tokenizers = pytest.importorskip('tokenizers')
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=WITH_TOOLS
  )
  theirs = tokenizer.apply_chat_template(
    WHOLE, tools=tools, add_generation_prompt=prompt, tokenize=False
  )
  assert ChatFormat(WITH_TOOLS, '').render(WHOLE, prompt, tools) == theirs


def learned(tmp_path, record, template) -> list[str]:
  """Returns what is learned of one record."""
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps(record))
  batch = SftRows([str(path)], packaged.VOCAB, 512, 8192, chat_template=template).read(
    np.array([0])
  )
  labels, is_learned = batch['labels'][0], batch['weights'][0] > 0
  ends = np.flatnonzero(np.diff(is_learned)) + 1
  parts = zip(np.split(labels, ends), np.split(is_learned, ends), strict=True)
  return [open_tokenizer(packaged.VOCAB).decode(ids.tolist()) for ids, here in parts if here[0]]


def test_calls_are_learned_and_results_are_not(tmp_path):
  call = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
  )
  assert learned(tmp_path, dict(messages=WHOLE, tools=[TOOL]), WITH_TOOLS) == [
    f'{call}<|im_end|>\n',
    'good day<|im_end|>\n',
  ]


def test_answers_within_a_prompt_are_not_learned(tmp_path):
  record = dict(prompt=[USER, ANSWER, USER], completion=[{**ANSWER, 'content': 'again'}])
  assert learned(tmp_path, record, WITH_TOOLS) == ['again<|im_end|>\n']


@pytest.mark.parametrize(
  ('template', 'chat', 'match'),
  [
    (WITHOUT_TOOLS, dict(messages=[USER, CALLING, ANSWER]), r'the call of weather \(message 2\)'),
    (WITHOUT_TOOLS, dict(messages=[USER, RESULT, ANSWER]), r'the result of a tool \(message 2\)'),
    (WITHOUT_TOOLS, dict(messages=[USER, ANSWER], tools=[TOOL]), 'the tool weather'),
    (WITH_TOOLS.replace('message.content }}\n    {%- for', "'' }}\n    {%- for"),
     dict(messages=[USER, {**CALLING, 'content': 'I look.'}]), 'the text next to a tool call'),
    (WITH_TOOLS.replace('message.tool_calls or []', 'message.tool_calls[:1]'),
     dict(messages=[USER, {**CALLING, 'tool_calls': [CALL, CALL]}]), 'the call of weather'),
  ],
)  # fmt: skip
def test_a_template_that_leaves_out_tools_is_refused(tmp_path, template, chat, match):
  with pytest.raises(UserError, match=f'a.jsonl:1: the chat template leaves out {match}'):
    learned(tmp_path, chat, template)


def test_conversations_with_tools_have_a_template_of_their_own(tmp_path):
  said = '{{ messages[0].content }}'
  texts = {'tool_use': f'tools: {said}', 'default': f'plain: {said}'}
  named = [{'name': name, 'template': text} for name, text in texts.items()]
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'chat_template': named}))
  chat = ChatFormat('', str(tmp_path / 'tokenizer.json'))
  assert chat.render([USER], False) == f'plain: {USER["content"]}'
  assert chat.render([USER], False, WRAPPED) == f'tools: {USER["content"]}'


@pytest.mark.parametrize(
  'template', ["{{ '' }}chat.txt says", '{{ bos_token }}', '{% if no %}a{% endif %}']
)
def test_a_template_that_writes_nothing_of_the_messages_is_refused(tmp_path, template):
  (tmp_path / 'tokenizer_config.json').write_text('{}')
  text = ChatFormat(template, str(tmp_path / 'tokenizer.json')).render([USER], True)
  with pytest.raises(UserError, match='writes none of the messages'):
    check_says_messages(text, [USER])
  check_says_messages(f'{text} {USER["content"]}', [USER])


@pytest.mark.parametrize(
  ('record', 'name'),
  [
    (
      {'messages': [USER, ANSWER], 'chat_template_kwargs': {'enable_thinking': False}},
      'chat_template_kwargs',
    ),
    ({'messages': [USER, {**ANSWER, 'weight': 0.5}]}, 'weight=0.5 of an answer must be'),
    ({'messages': [USER, {**ANSWER, 'weight': 1, 'train': False}]}, 'contradict each other'),
    ({'messages': [USER, {**ANSWER, 'train_detail': [{'train': False}]}]}, "'train_detail' of"),
    ({'messages': [USER, ANSWER], 'loss_mask': [1]}, '0 or 1 for each of 2 messages'),
    ({'messages': [USER, ANSWER], 'weight': 0}, "'weight' of this record is not read"),
    ({'messages': [USER, ANSWER], 'images': ['a.png']}, 'only text is supported'),
    ({'messages': [USER, {**ANSWER, 'images': ['a.png']}]}, "'images' of messages is not read"),
    ({'messages': [USER, ANSWER], 'context': 'a book'}, "'context' of this record is not read"),
    ({'inputs': 'a', 'targets': 'b', 'system': 's'}, "'system' of this record is not read"),
    ({'prompt': 'a', 'completion': 'b', 'tools': [TOOL]}, "'tools' of this record is not read"),
    ({'prompt': 'a', 'completion': 'b', 'reasoning': 'r'}, "'reasoning' of this record"),
    ({'inputs': 'ab', 'targets': 'c', 'instruction': 'a'}, "'instruction' of this record"),
    ({'inputs': 'a1', 'targets': 'b', 'input': '1'}, "'input' of this record"),
    ({'messages': [USER, ANSWER], 'masked': True}, "'masked' of this record"),
    ({'messages': [USER, ANSWER], 'images': ['hello']}, 'only text is supported'),
    (
      {'messages': [USER, {**CALLING, 'function_call': {'name': 'f', 'arguments': '{}'}}]},
      'both "function_call" and "tool_calls"',
    ),
    (
      {
        'messages': [
          USER,
          {**CALLING, 'tool_calls': [dict(name='f', arguments={'a': 1}, parameters={'a': 2})]},
        ]
      },
      'contradict each other:',
    ),
    ({'messages': WHOLE, 'system': 'be brief'}, 'begin with another:'),
    ({'messages': WHOLE, 'system': 'a', 'system_prompt': 'b'}, 'contradict each other:'),
  ],
)
def test_what_changes_what_is_learned_is_read_or_refused(record, name):
  fields = Fields(record)
  with pytest.raises(UserError, match=name):
    check_unread(fields, SftRows.contents_of(fields))


def test_reasoning_that_the_template_leaves_out_is_said(tmp_path):
  path = tmp_path / 'a.jsonl'
  turn = {'from': 'gpt', 'value': 'good day', 'reasoning_content': 'be polite'}
  path.write_text(
    json.dumps(dict(conversations=[*turns(('human', 'hello')), turn])) + '\n'
    + json.dumps(dict(messages=[USER, ANSWER])) + '\n'
  )  # fmt: skip
  writes = PLAIN.replace('{{ m.content }}', "{{ m.reasoning_content or '' }}{{ m.content }}")
  for template, count in ((PLAIN, 1), (writes, 0)):
    rows = SftRows([str(path)], packaged.VOCAB, 64, 8192, chat_template=template)
    assert sum('leaves out the reasoning' in line for line in rows.warnings) == count


MARKS = [('weight', 0), ('weight', '0'), ('weight', 0.0), ('train', False), ('train', 'false'),
         ('training', False), ('loss', False), ('trainable', False), ('loss_mask', 0),
         ('masked', True)]  # fmt: skip


@pytest.mark.cases(fast=12)
@pytest.mark.parametrize(('key', 'value'), MARKS)
@pytest.mark.parametrize('form', ['messages', 'turns', 'prompt'])
@pytest.mark.parametrize('template', [WITH_TOOLS, MARKED], ids=['plain', 'generation'])
def test_an_answer_that_is_marked_is_read_and_not_learned(tmp_path, key, value, form, template):
  bad = {'role': 'assistant', 'content': 'go away', key: value}
  chat = [USER, bad, USER, {**ANSWER, 'weight': 1}]
  turn = lambda m: {k: v for k, v in m.items() if k not in ('role', 'content')} | {
    'from': {'user': 'human', 'assistant': 'gpt'}[m['role']], 'value': m['content']
  }  # fmt: skip
  record = {
    'messages': lambda: {'messages': chat},
    'turns': lambda: {'conversations': [turn(m) for m in chat]},
    'prompt': lambda: {'prompt': chat[:1], 'completion': chat[1:]},
  }[form]()
  assert [text.strip().removesuffix('<|im_end|>') for text in learned(tmp_path, record, template)
          ] == ['good day']  # fmt: skip


@pytest.mark.parametrize(
  ('record', 'contents'),
  [
    (dict(messages=[USER, ANSWER], system='be kind'), Conversation([WHOLE[0], USER, ANSWER])),
    (dict(messages=[USER, ANSWER], system_prompt='be kind', tools=[]),
     Conversation([WHOLE[0], USER, ANSWER])),
    (dict(messages=WHOLE, system='be kind'), Conversation(WHOLE)),
    (dict(messages=WHOLE, functions=[TOOL]), Conversation(WHOLE, WRAPPED)),
    (dict(prompt=[USER], completion=[ANSWER], system='be kind'),
     Conversation([WHOLE[0], USER, ANSWER], None, 2)),
    (dict(prompt=json.dumps([USER]), completion=json.dumps([ANSWER])),
     Conversation([USER, ANSWER], None, 1)),
    (dict(conversations=turns(('Human', 'hello'), ('GPT', 'good day'))),
     Conversation([USER, ANSWER])),
    (dict(instruction='hello', response='good day', context=''), Conversation([USER, ANSWER])),
    (dict(instruction='he', context='llo', output='good day', history=[['a', 'b']]),
     Conversation([dict(role='user', content='a'), dict(role='assistant', content='b'),
                   dict(role='user', content='he\n\nllo'), ANSWER])),
    (dict(messages=[USER, ANSWER, USER, ANSWER], loss_mask=[0, 0, 0, 1]),
     Conversation([USER, ANSWER, USER, ANSWER], masked=frozenset([1]))),
    (dict(conversations=[dict(turns(('human', 'hello'))[0], id=1),
                         dict(turns(('gpt', 'good day'))[0], weight=1.0)]),
     Conversation([USER, ANSWER])),
    (dict(messages=[dict(role='system', content='be kind '), USER, ANSWER], system='be kind'),
     Conversation([dict(role='system', content='be kind '), USER, ANSWER])),
    (dict(instruction='hello', output='good day', prompt='### Ask: hello ### Say: good day'),
     Conversation([USER, ANSWER])),
    (dict(messages=[], instruction='hello', output='good day'), Conversation([USER, ANSWER])),
    (dict(messages=[dict(role='developer', content='be kind'), USER, ANSWER]),
     Conversation([WHOLE[0], USER, ANSWER])),
    (dict(messages=[USER, ANSWER], prompt='hello', weight=1, context='', chat_template_kwargs={}),
     Conversation([USER, ANSWER])),
  ],
)  # fmt: skip
def test_what_stands_beside_the_messages_is_read(record, contents):
  fields = Fields(record)
  (found,) = SftRows.contents_of(fields)
  assert found == contents
  assert check_unread(fields, [found]) == []


@pytest.mark.parametrize('key', ['arguments', 'parameters'])
@pytest.mark.parametrize('inner', [False, True])
def test_calls_have_their_arguments_under_two_names(key, inner):
  call = {'name': 'weather', key: ARGUMENTS}
  call = {'function': call} if inner else call
  fields = Fields({'messages': [USER, {'role': 'assistant', 'tool_calls': [call]}]})
  (found,) = SftRows.contents_of(fields)
  assert found.messages[1]['tool_calls'] == [CALL]
  assert check_unread(fields, [found]) == []


def test_other_keys_are_counted_and_said_once(tmp_path):
  path = tmp_path / 'a.jsonl'
  odd = dict(rating=3, messages=[USER, {**ANSWER, 'stars': 4}], id=7, empty='')
  records = [odd, odd, dict(messages=[USER, ANSWER], source='x')]
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  rows = SftRows([str(path)], packaged.VOCAB, 64, 8192, chat_template=PLAIN)
  (said,) = [w for w in rows.warnings if w.startswith('Ignored keys,')]
  assert said.endswith('of 3 records have them: rating (2), messages.stars (2)')


def test_each_answer_of_a_chat_may_be_an_example(tmp_path):
  """The calls of a tool are answers, too; those of a conversation are held out together."""
  chats = [[dict(USER, content=f'hello {i}'), *WHOLE[2:], USER, ANSWER] for i in range(4)]
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps(dict(messages=m, tools=[TOOL])) + '\n' for m in chats))
  rows = AnswerRows([str(path)], packaged.VOCAB, 512, 8192, chat_template=WITH_TOOLS)
  assert rows.num_examples == 12
  answers, whole = [], rows.tokenizer.decode(rows.example(2).ids.tolist())
  for i in range(3):
    example = rows.example(i)
    learned = np.flatnonzero(example.is_answer)
    assert (np.diff(learned) == 1).all()
    assert learned[-1] == len(example.ids) - 1
    answers.append(rows.tokenizer.decode(example.ids[learned].tolist()))
    assert whole.startswith(rows.tokenizer.decode(example.ids[: learned[0]].tolist()))
  assert answers[0].startswith('<tool_call>')
  assert [a.startswith('good day') for a in answers] == [False, True, True]
  held = AnswerRows(
    [str(path)], packaged.VOCAB, 512, 8192, chat_template=WITH_TOOLS, split='held_out',
    held_out_share=0.25,
  )  # fmt: skip
  assert held.num_examples == 3


def test_labels_that_are_not_read_are_said(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps(dict(prompt='a', completion=' b', label=False)) + '\n')
  rows = SftRows([str(path)], packaged.VOCAB, 64, 8192)
  assert any('1 record (the first: ' in w and '--method=kto' in w for w in rows.warnings)
  pair = tmp_path / 'b.jsonl'
  pair.write_text(json.dumps(dict(prompt='a', chosen=' b', rejected=' c', label=1)) + '\n')
  (said,) = PreferenceRows([str(pair)], packaged.VOCAB, 64, 8192).warnings
  assert said.endswith('of 1 records have them: label (1)')


_NAMES = st.text('abcdefghij', min_size=3, max_size=12).map('odd_{}'.format)
_KNOWN = st.sampled_from([
  'system', 'system_prompt', 'tools', 'functions', 'context', 'input', 'question', 'history',
  'reasoning', 'thinking', 'weight', 'loss_mask', 'images', 'margin', 'prompt', 'instruction',
  'masked', 'train', 'query', 'messages', 'conversations',
])  # fmt: skip
_VALUES = st.one_of(
  st.text('xyz', min_size=4, max_size=9),
  st.lists(st.text('xyz', min_size=4, max_size=9), min_size=1, max_size=2), st.just([TOOL]),
  st.integers(0, 9), st.booleans(), st.sampled_from(['1', '0', 'on', 'hello']),
)  # fmt: skip
_BASES = [
  dict(messages=[USER, ANSWER]), dict(conversations=turns(('human', 'hello'), ('gpt', 'good day'))),
  dict(inputs='hello', targets='good day'), dict(prompt='hello', completion='good day'),
  dict(prompt=[USER], completion=[ANSWER]), dict(instruction='hello', output='good day'),
  dict(prompt='hello', chosen='good day', rejected='go away'),
  dict(chosen=[USER, ANSWER], rejected=[USER, dict(ANSWER, content='go away')]),
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(_BASES), st.one_of(_KNOWN, _NAMES), _VALUES)
def test_no_key_of_a_record_is_dropped_without_a_word(base, key, value):
  """It is in what is learned, or it is refused by its name, or counted."""
  assume(key not in base)
  fields = Fields(base | {key: value})
  read = PreferenceRows.contents_of if 'chosen' in base else SftRows.contents_of
  refusal = ''
  try:
    contents = read(fields)
    counted = check_unread(fields, contents)
  except UserError as e:
    refusal = str(e)
  if refusal:
    assert key in refusal or (key == 'functions' and '"tools"' in refusal)
    return
  said = json.dumps([c if isinstance(c, Pair) else [c.messages, c.tools] for c in contents])
  told = value if isinstance(value, str) else json.dumps(value)[1:-1]
  # a weight of 1, or a mark that masks nothing
  changes_nothing = str(value).lower() in (('0', 'false') if key == 'masked' else ('1', 'true'))
  changes_nothing &= key in ('weight', 'train', 'masked')
  changes_nothing |= key == 'history' and not value
  assert key in counted or told in said or changes_nothing


@settings(max_examples=200, deadline=None)
@given(_NAMES, _VALUES, st.sampled_from(['messages', 'conversations']))
def test_no_key_of_a_message_is_dropped_without_a_word(key, value, form):
  answer = {'messages': ANSWER, 'conversations': {'from': 'gpt', 'value': 'good day'}}[form]
  fields = Fields({form: [USER, answer | {key: value}]})
  (contents,) = SftRows.contents_of(fields)
  assert f'messages.{key}' in check_unread(fields, [contents])
  if form == 'messages':
    assert contents.messages[1][key] == value  # the chat template may read it
