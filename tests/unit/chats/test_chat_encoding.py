"""Documents, pairs and conversations are encoded as a whole; what is learned are spans."""

import io
import json
import pathlib
import random

import numpy as np
import pytest

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.chats.chat_format import ChatFormat
from paxlite.chats.chat_spans import learned
from paxlite.chats.conversations import conversation
from paxlite.chats.sft_formats import format_of, identity
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.data import packaged
from paxlite.data.tokenizer import check_vocabulary, open_tokenizer
from paxlite.data.tokenizer_copies import copy_tokenizer
from paxlite.experiments import finetuning
from paxlite.experiments.llama import SmolLM135M
from paxlite.files.text_files import read_text
from paxlite.finetuning.chats.sft import SftRows, held_out
from paxlite.weights.families import config_json

tokenizers = pytest.importorskip('tokenizers')
from tests.support.tokenizer_draws import TEMPLATES, draw_chat, draw_tokenizer  # noqa: E402

CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']


def written(folder, template=CHATML, marks=MARKS, **stated):
  """Writes a byte-level tokenizer without merges; returns its folder."""
  folder.mkdir(exist_ok=True)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[])
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(marks)
  made.save(str(folder / 'tokenizer.json'))
  stated = {'eos_token': '<|endoftext|>', 'chat_template': template} | stated
  (folder / 'tokenizer_config.json').write_text(json.dumps(stated))
  return str(folder)


def chat(*contents, **more):
  """Returns a conversation whose messages are those of a user and an assistant in turn."""
  roles = ('user', 'assistant') * len(contents)
  return conversation([{'role': r, 'content': c} for r, c in zip(roles, contents, strict=False)])


def texts(found) -> list[str]:
  return [found.text[start:end] for start, end in found.spans]


def test_a_long_document_is_encoded_as_a_whole():
  tokenizer = open_tokenizer(packaged.VOCAB)
  text = read_text(packaged.TEXTS[1])[:70_000] + '\n\n\n\n' + read_text(packaged.TEXTS[1])[:70_000]
  assert ChatEncoding(tokenizer).document(text).tolist() == [
    *tokenizer.encode(text),
    tokenizer.eos_id,
  ]


def test_a_blank_line_is_no_end_of_an_answer_though_it_is_an_added_token(tmp_path):
  template = '{% for m in messages %}{{ m.role + ": " + m.content + "\n\n" }}{% endfor %}'
  blank = {'added_tokens_decoder': {'300': {'content': '\n\n', 'special': False}}}
  tokenizer = open_tokenizer(written(tmp_path, template, **blank))
  assert tokenizer.decode(tokenizer.encode('a\n\n')[1:]) == '\n\n'
  assert len(tokenizer.encode('a\n\n')) == 2
  assert ChatEncoding(tokenizer).answer_end_ids == []


def test_what_is_beside_a_tokenizer_is_a_part_of_its_fingerprint(tmp_path):
  variants = {
    'as it is': {},
    'another template': {'chat_template': 'x', 'padding_side': 'left'},
    'a prefix space': {'add_prefix_space': True, 'tokenizer_class': 'GPT2Tokenizer'},
    'another token': {'extra_special_tokens': ['<more>']},
  }
  found = {
    name: ChatEncoding(open_tokenizer(written(tmp_path / name, **stated))).fingerprint
    for name, stated in variants.items()
  }
  assert found.pop('another template') == found['as it is']
  assert len(set(found.values())) == 3


def test_a_pair_is_one_text_and_its_prompt_may_differ():
  tokenizer = open_tokenizer(packaged.VOCAB)
  encoding = ChatEncoding(tokenizer)
  good, bad = encoding.pair('The king', ' is dead'), encoding.pair('The king ', 'is dead')
  whole = [tokenizer.bos_id, *tokenizer.encode('The king is dead'), tokenizer.eos_id]
  assert good.ids.tolist() == bad.ids.tolist() == whole
  assert (good.prompt_differs, bad.prompt_differs) == (False, True)
  assert tokenizer.decode(good.ids[good.is_learned].tolist()) == ' is dead'
  assert good.ids[: len(encoding.prompt('The king'))].tolist() == encoding.prompt('The king')


def test_an_end_that_the_answer_has_itself_is_not_doubled(tmp_path):
  encoding = ChatEncoding(open_tokenizer(written(tmp_path)))
  assert encoding.pair('a', 'b<|endoftext|>').ids.tolist() == encoding.pair('a', 'b').ids.tolist()


@pytest.mark.parametrize(
  ('template', 'eos_ids', 'ends'),
  [
    (CHATML, [], [256, 258]),
    (CHATML, [7, 258], [7, 258]),
    (CHATML.replace('<|im_end|>', ' </end>'), [], [256]),
    (CHATML.replace('<|im_end|>', ' <|endoftext|>'), [], [256]),
    (CHATML.replace('m.content', "(m.content or m.tool_calls[0].function.name + '<|im_start|>')"),
     [], [256, 258]),
    ("{{ raise_exception('never') }}", [], [256]),
  ],
)  # fmt: skip
def test_what_ends_an_answer(tmp_path, template, eos_ids, ends):
  tokenizer = open_tokenizer(written(tmp_path, template))
  assert ChatEncoding(tokenizer, eos_ids=eos_ids).chat_eos_ids == ends


def test_the_end_of_a_text_is_one_that_stops_generation(tmp_path):
  tokenizer = open_tokenizer(written(tmp_path))
  for stated, end in (([], [256]), ([7, 256], [256]), ([7, 9], [7])):
    assert ChatEncoding(tokenizer, eos_ids=stated).end_ids == end
  nothing = open_tokenizer(written(tmp_path / 'b', eos_token=None))
  assert ChatEncoding(nothing).document('a').tolist() == nothing.encode('a')
  assert 'The tokenizer has no EOS' in ChatEncoding(nothing).warnings[0]
  assert ChatEncoding(nothing, eos_ids=[256]).warnings == []


def files(folder, **contents) -> str:
  for name, value in contents.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return str(folder)


@pytest.mark.parametrize(
  'stated',
  [
    dict(tokenizer_config={}, special_tokens_map={'eos_token': '<|endoftext|>'}),
    dict(tokenizer_config={}, special_tokens_map={'eos_token': {'content': '<|endoftext|>'}}),
    dict(tokenizer_config={'added_tokens_decoder': {}},
         special_tokens_map={'eos_token': '<|endoftext|>'}),
    dict(tokenizer_config={'model_max_length': 1024}, config={'model_type': 'gpt2'}),
    dict(tokenizer_config={'tokenizer_class': 'GPT2TokenizerFast'}),
  ],
)  # fmt: skip
def test_eos_is_found_wherever_it_is_published(tmp_path, stated):
  written(tmp_path)
  assert open_tokenizer(files(tmp_path, **stated)).eos_id == 256


def test_what_a_class_of_transformers_has_by_default_is_not_what_a_file_denies(tmp_path):
  written(tmp_path)
  denied = {'eos_token': None, 'tokenizer_class': 'GPT2Tokenizer'}
  assert open_tokenizer(files(tmp_path, tokenizer_config=denied)).eos_id is None


THINK = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}
{%- if loop.last %}
{{- '<think>\n' + m.reasoning_content | default('') + '\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""


def test_thinking_that_the_template_drops_or_adds(tmp_path):
  """As in Qwen3: only the last answer has its thinking, and an empty one is not learned."""
  chat_format = ChatFormat(THINK, '')
  found = learned(chat_format, chat('a', 'one', 'b', 'two'))
  assert texts(found) == ['one<|im_end|>\n', 'two<|im_end|>\n']
  assert found.missed == []
  assert found.without_thinking == [False, True]
  reasoned = conversation([
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'one', 'reasoning': 'why'},
  ])  # fmt: skip
  assert texts(learned(chat_format, reasoned)) == ['<think>\nwhy\n</think>\n\none<|im_end|>\n']


def test_prompts_of_a_run_that_learned_no_thinking_ask_for_none(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'messages': chat('a', 'one').messages}) + '\n')
  rows = SftRows([str(path)], written(tmp_path / 't', THINK), 64, 259)
  assert rows.thinking is False
  assert 'CHAT_THINKING=False' in rows.warnings[0]
  example = rows.example(0)
  prompt = ChatEncoding(rows.tokenizer, thinking=False).chat_prompt(chat('a').messages)
  assert example.ids[: len(prompt)].tolist() == prompt
  assert not example.is_answer[: len(prompt)].any()
  assert example.is_answer[len(prompt) :].all()


def test_generation_blocks_say_what_is_learned():
  within = "m.content[:1] }}{% generation %}{{ m.content[1:] }}{% endgeneration %}{{ '<|im_end|>"
  template = CHATML.replace("m.content + '<|im_end|>", within)
  chat_format = ChatFormat(template, '')
  assert chat_format.render(chat('ab', 'cd').messages, False) == ChatFormat(CHATML, '').render(
    chat('ab', 'cd').messages, False
  )
  assert texts(learned(chat_format, chat('ab', 'cd'))) == ['b', 'd']
  pair = conversation(chat('ab', 'cd', 'ef', 'gh').messages, None, first_learned=2)
  assert texts(learned(chat_format, pair)) == ['h']


def test_an_answer_that_the_template_leaves_out_is_named(tmp_path):
  template = CHATML.replace('in messages', 'in messages[-2:]')
  found = learned(ChatFormat(template, ''), chat('a', 'one', 'b', 'two'))
  assert (texts(found), found.missed) == (['two<|im_end|>\n'], [2])
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'messages': chat('a', 'one', 'b', 'two').messages}) + '\n')
  rows = SftRows([str(path)], written(tmp_path / 't', template), 99, 259)
  assert 'another text before the last answer' in rows.warnings[0]  # its prompt has message 2
  assert rows.warnings[1:] == [
    f'1 answer (the first: {path}:1, message 2) not learned, because their place in the '
    "chat template's text is unknown"
  ]


def test_every_answer_is_learned_where_eos_stands_behind_the_conversation(tmp_path):
  # as in Phi-3
  template = CHATML.replace('{% endif %}', '{% else %}{{ eos_token }}{% endif %}')
  assert template.count('{{ eos_token }}') == 1
  tokenizer = open_tokenizer(written(tmp_path, template))
  encoded = ChatEncoding(tokenizer).chat(chat('a', 'b', 'c', 'd'))
  assert not encoded.missed
  learned = tokenizer.decode_marked(encoded.ids[encoded.is_learned].tolist())
  assert learned == 'b<|im_end|>\nd<|im_end|>\n<|endoftext|>'


def test_a_prompt_that_no_conversation_has_is_said(tmp_path):
  # DeepSeek-R1 asks for thinking, and drops that of the conversation
  asks = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
  assert asks != CHATML
  file = tmp_path / 'a.jsonl'
  file.write_text(json.dumps({'messages': chat('a', 'b', 'c', 'd').messages}) + '\n')
  for template, count in ((CHATML, 0), (asks, 1)):
    rows = SftRows([str(file)], written(tmp_path, template), 200, 300)
    assert sum('generation starts from untrained text' in r for r in rows.warnings) == count
    example = rows.example(0)
    learned = rows.tokenizer.decode_marked(example.ids[example.is_answer].tolist())
    assert learned == 'b<|im_end|>\nd<|im_end|>\n'


def test_a_template_for_tools_may_be_a_file(tmp_path):
  # as transformers saves it
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  folder = pathlib.Path(written(tmp_path / 'a'))
  folder = folder.parent if folder.is_file() else folder
  (folder / 'chat_template.jinja').write_text('{{ messages[0].content }}{{ tools }}')
  (folder / 'additional_chat_templates').mkdir()
  for_tools = folder / 'additional_chat_templates' / 'tool_use.jinja'
  for_tools.write_text('{{ messages[0].content }} with {{ tools[0].function.name }}')
  copy_tokenizer(folder, tmp_path / 'b')
  said, tool = [{'role': 'user', 'content': 'hi'}], {'type': 'function', 'function': {'name': 'f'}}
  for place in (folder, tmp_path / 'b'):
    encoding = ChatEncoding(open_tokenizer(str(place)))
    assert encoding.chat_text(said, False, [tool]) == 'hi with f'
    assert encoding.chat_text(said, False) == 'hiNone'


def test_ids_without_tokens_and_tokens_without_rows(tmp_path):
  folder = written(tmp_path)
  tree = json.loads((tmp_path / 'tokenizer.json').read_text())
  tree['model']['vocab'] = {t: i + 44 * (i >= 100) for t, i in tree['model']['vocab'].items()}
  for entry in tree['added_tokens']:
    entry['id'] += 44
    tree['model']['vocab'][entry['content']] = entry['id']
  (tmp_path / 'tokenizer.json').write_text(json.dumps(tree))
  tokenizer = open_tokenizer(folder)
  assert tokenizer.vocab_size == 303
  assert np.flatnonzero(~tokenizer.is_token).tolist() == list(range(100, 144))
  for rows in (303, 302, 300):
    check_vocabulary(tokenizer, rows)
  with pytest.raises(UserError, match='another model'):
    check_vocabulary(tokenizer, 299)
  encoding = ChatEncoding(tokenizer, 302)
  assert encoding.text('a<|im_start|>')
  for encode in (encoding.text, encoding.prompt, encoding.document, encoding.marked):
    with pytest.raises(UserError, match=r"the token '<\|im_end\|>' with id 302"):
      encode('a<|im_end|>b')


def test_a_control_token_does_not_begin_a_text_of_its_own(tmp_path):
  """SentencePiece puts a space before a text, and not before what follows </s> in it."""
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(['the king is dead', 'a king is a king'] * 20), model_writer=model,
    vocab_size=300, hard_vocab_limit=False, byte_fallback=True, minloglevel=2,
    control_symbols=['<|im_end|>'], user_defined_symbols=['<tool>'],
  )  # fmt: skip
  path = tmp_path / 'a.model'
  path.write_bytes(model.getvalue())
  tokenizer = open_tokenizer(str(path))
  piece = tokenizer._model.IdToPiece
  tokens = tokenizer.encode_tokens('the</s>king<|im_end|><tool>a 😀', marked=True)
  found = ''.join(piece(int(i)) for i in tokens.ids)
  assert found == '▁the</s>king<|im_end|><tool>a▁<0xF0><0x9F><0x98><0x80>'
  assert tokenizer.decode(tokens.ids) == 'the king<tool>a 😀'.replace('the king', 'theking')
  assert tokenizer.decode(tokens.ids[tokens.within([(7, 11)])].tolist()) == 'king'
  assert tokens.within([(29, 30)]).tolist() == [False] * (len(tokens.ids) - 4) + [True] * 4


def test_the_day_of_a_template_is_given():
  chat_format = ChatFormat("{{ strftime_now('%d %b %Y') }}", '', '2024-02-29')
  assert chat_format.reads_clock
  assert chat_format.render(chat('a').messages, False) == '29 Feb 2024'
  with pytest.raises(UserError, match='random'):
    ChatFormat('{{ [1, 2] | random }}', '')


def test_what_is_held_out_is_the_record(tmp_path):
  records = [{'messages': chat(f'q{i}', f'a{i}').messages} for i in range(40)]
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps(r) + '\n' for r in records))
  clock = "{{ strftime_now('%Y') }}" + CHATML  # a year that is over, and this one
  kept = {}
  for name, template, date in (('a', CHATML, ''), ('b', clock, '2024-02-29'), ('c', clock, '')):
    folder = written(tmp_path / name, template)
    kept[name] = SftRows([str(path)], folder, 99, 259, date=date, split='held_out',
                         held_out_share=0.1)  # fmt: skip
  answers = [
    [r.tokenizer.decode(r.example(i).ids).split('assistant\n')[1] for i in range(r.num_examples)]
    for r in kept.values()
  ]
  assert answers[0] == answers[1] == answers[2]
  assert len({r.fingerprint for r in kept.values()}) == 1
  assert len({r.tokens_fingerprint for r in kept.values()}) == 3


def test_the_identity_of_a_record_is_what_it_says():
  read = lambda record: identity(format_of(Fields(record)).read(Fields(record)))
  turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
  same = [
    dict(messages=turns),
    dict(id=3, messages=[{'content': 'a', 'role': 'user', 'name': None}, turns[1]]),
    dict(messages=json.dumps(turns)),
    dict(conversations=[{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]),
  ]
  assert len(set(map(read, same))) == 1
  assert read(dict(prompt='a', completion='b')) != read(same[0])
  assert read(dict(prompt=turns[:1], completion=turns[1:])) != read(same[0])
  assert held_out([read(same[0])] * 2, 0.5).tolist() == [True, True]


def test_an_export_stops_where_the_run_stops(tmp_path):
  folder = pathlib.Path(written(tmp_path))
  stops = lambda e: config_json(e, 'float32', folder)['eos_token_id']
  tuned = finetuning.HuggingFaceSFT(MODEL='SmolLM135M', EOS_IDS=[256])
  assert stops(tuned) == [256, 258]
  assert stops(tuned.replaced(CHAT_TEMPLATE=CHATML.replace('<|im_end|>', ''))) == 256
  assert stops(SmolLM135M(EOS_IDS=[7])) == 7
  assert stops(SmolLM135M()) == 256


def test_a_copy_of_a_tokenizer_keeps_the_class_that_config_json_gave_it(tmp_path):
  written(tmp_path / 'a')
  files(tmp_path / 'a', tokenizer_config={'model_max_length': 9}, config={'model_type': 'gpt2'})
  (tmp_path / 'b').mkdir()
  copy_tokenizer(tmp_path / 'a', tmp_path / 'b')
  assert open_tokenizer(str(tmp_path / 'b')).eos_id == 256
  stated = json.loads((tmp_path / 'b' / 'tokenizer_config.json').read_text())
  assert stated == {'model_max_length': 9, 'tokenizer_class': 'GPT2Tokenizer'}


def test_a_prompt_is_compared_from_its_last_mark_on(tmp_path):
  """The ids of the whole prompt say the same, whatever the tokenizer does at marks."""
  found = set()
  for seed in range(30):
    rng, folder = random.Random(seed), tmp_path / str(seed)
    folder.mkdir()
    name = rng.choice(sorted(TEMPLATES))
    drawn = draw_tokenizer(rng, folder, TEMPLATES[name])
    encoding = ChatEncoding(open_tokenizer(str(folder)))
    for _ in range(3):
      chat = conversation(draw_chat(rng, name))
      text = encoding.chat_format.render(chat.messages, False)
      tokens = encoding.tokenizer.encode_tokens(text, marked=True)
      for end in (text.rfind(chat.messages[-1]['content']), rng.randint(0, len(text))):
        is_answer = tokens.ends > end
        alone = encoding.tokenizer.encode_tokens(text[:end], marked=True).ids.tolist()
        begins = np.flatnonzero(is_answer)[:1].tolist()
        differs = alone != tokens.ids[: len(alone)].tolist() or begins not in ([len(alone)], [])
        assert encoding._differs(text[:end], tokens, is_answer, True) == differs, (drawn, text, end)
        found.add(differs)
  assert found == {True, False}
