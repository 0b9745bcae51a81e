"""What a person types into a conversation."""

import io

import pytest

from paxlite.generation.commands import generate


@pytest.mark.parametrize('word', ['exit', 'quit', ' EXIT ', '/bye', '/exit'])
def test_a_word_ends_it(monkeypatch, word):
  monkeypatch.setattr('sys.stdin', io.StringIO(f'hello\n\nhow do I exit?\n{word}\nlost\n'))
  assert [*generate._questions()] == ['hello', 'how do I exit?']


@pytest.mark.parametrize('is_terminal', [True, False])
def test_only_a_terminal_gets_escaped_characters(monkeypatch, is_terminal):
  out, parts = io.StringIO(), ['a\r\n', '\x1b[2J\f', '\u202eb']
  monkeypatch.setattr(out, 'isatty', lambda: is_terminal)
  monkeypatch.setattr('sys.stdout', out)
  assert generate._show(iter(parts)) == ''.join(parts)
  escaped = 'a\n\\x1b[2J\\x0c\\u202eb'
  assert out.getvalue() == (escaped if is_terminal else ''.join(parts)) + '\n'
