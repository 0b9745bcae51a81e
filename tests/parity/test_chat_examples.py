"""Answers of chats as examples of their own, by the templates of published models, from trl."""

import pathlib

import pytest

from paxlite.chats.chat_format import ChatFormat
from paxlite.chats.chat_spans import learned
from paxlite.chats.conversations import conversation
from paxlite.finetuning.chats.example_reader import answers_of

trl = pytest.importorskip('trl')
FOLDER = pathlib.Path(trl.__file__).parent / 'chat_templates'
# those of models with images take lists of parts as contents
IMAGES = {'idefics3', 'llava_next', 'smolvlm'}
FAMILIES = sorted(
  {p.stem for p in FOLDER.glob('*.jinja') if not p.stem.endswith('_training')} - IMAGES
)
KEEP_THINKING = {
  'qwen3', 'qwen3_5_think', 'deepseek_r1_distill', 'deepseekv3', 'glm4moe', 'gptoss', 'lfm2_2_5',
  'nemotron_3_nano',
}  # fmt: skip
# It writes the thinking behind a prompt that turns it off; paxlite data says so
UNPROMPTED = {'qwen3_5_nothink'}

CHAT = conversation([
  dict(role='user', content='What is 2 + 3?'),
  dict(role='assistant', content='It is five.', reasoning_content='Two and three.'),
  dict(role='user', content='And 4 + 4?'),
  dict(role='assistant', content='It is eight.', reasoning_content='Four twice.'),
])  # fmt: skip


@pytest.mark.parametrize('family', FAMILIES)
def test_each_answer_follows_the_prompt_that_asks_for_it(family):
  tokens = dict(bos_token='<s>', eos_token='</s>')
  text = (FOLDER / f'{family}.jinja').read_text()
  chat_format = ChatFormat(text, '', '2026-11-26', tokens)
  for part, answer in zip(answers_of(CHAT), ('It is five.', 'It is eight.'), strict=True):
    prompt = chat_format.render(part.messages[:-1], True)
    found = learned(chat_format, part)
    assert not found.missed
    (span,) = found.spans
    assert found.is_unprompted == (family in UNPROMPTED)
    assert found.is_unprompted or found.text[: span[0]] == prompt
    said = found.text[slice(*span)]
    assert answer in said
    assert family not in KEEP_THINKING or 'wo' in said or 'our twice' in said
