"""What a request says within its fields."""

import pytest

from paxlite.serving.bodies import _IGNORED_WITHIN, _inner, _with_contents
from paxlite.serving.errors import ApiError
from paxlite.serving.fields import RequestFields


@pytest.mark.parametrize('key', ['prefix', 'partial'])
def test_an_answer_that_is_to_be_continued_is_refused(key):
  begun = {'role': 'assistant', 'content': 'It is', key: True}
  with pytest.raises(ApiError, match=f'{key}: an answer cannot be continued'):
    _with_contents([{'role': 'user', 'content': 'What?'}, begun])
  assert _with_contents([{**begun, key: False}]) == [{**begun, key: False}]


def test_the_content_of_an_assistant_may_be_null():
  said = [{'role': 'assistant', 'content': None}, {'role': 'user', 'content': None}]
  assert _with_contents(said) == [{'role': 'assistant', 'content': ''}, said[1]]
  assert _with_contents('hello') == 'hello'


@pytest.mark.parametrize('name', ['stream_options', 'response_format'])
@pytest.mark.parametrize('key', ['continuous_usage_stats', 'schema', 'x'])
def test_what_nobody_reads_within_a_field_is_refused(name, key):
  inner = _inner(
    RequestFields({name: {key: 1, **dict.fromkeys(_IGNORED_WITHIN, 1)}}, (), {}), name, {}
  )
  inner.get('type')
  with pytest.raises(ApiError, match=f'Unrecognized request argument supplied: {key}'):
    inner.check_all_read()
  with pytest.raises(ApiError, match=f'{name} must be an object'):
    _inner(RequestFields({name: [key]}, (), {}), name, {})
