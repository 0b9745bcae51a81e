"""What a person types into a conversation."""

import io

import pytest

from paxlite.tools import generate


@pytest.mark.parametrize('word', ['exit', 'quit', ' EXIT ', '/bye', '/exit'])
def test_a_word_ends_it(monkeypatch, word):
  monkeypatch.setattr('sys.stdin', io.StringIO(f'hello\n\nhow do I exit?\n{word}\nlost\n'))
  assert [*generate._questions()] == ['hello', 'how do I exit?']
