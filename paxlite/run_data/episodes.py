"""Recorded episodes of rollouts, as text."""

from collections.abc import Iterator, Mapping, Sequence

from paxlite.core.json_text import Json, JsonObject


def lines(episode: JsonObject) -> Iterator[str]:
  """Yields the lines that show an episode: its reward, prompt and answers."""
  cut = ', cut at its longest' if episode.get('is_cut') else ''
  yield f'Row {episode.get("row")}  {worth(episode)}{cut}  ({episode.get("place")})'
  for text in [*said(episode.get('prompt')), *said(episode.get('answer'))]:
    yield from (f'    {line}' for line in text.split('\n'))


def worth(episode: JsonObject) -> str:
  """Returns the reward and the advantage of an episode, and its single rewards by name.

  An episode without a reward is one of distillation: who wrote the answer is returned.
  """
  if 'reward' not in episode:
    return 'a given answer' if episode.get('is_given') else "the student's answer"
  rewards = episode.get('rewards')
  known = rewards.items() if isinstance(rewards, Mapping) else ()
  each = ', '.join(f'{name} {_number(value)}' for name, value in known)
  own = f' ({each})' if each else ''
  return f'reward {_number(episode.get("reward"))}{own}, advantage {_number(episode["advantage"])}'


def said(messages: Json) -> list[str]:
  """Returns a text for each message, 'role: content'."""
  if not isinstance(messages, Sequence) or isinstance(messages, str):
    return [f'prompt: {messages}']
  known = [m for m in messages if isinstance(m, Mapping)]
  return [f'{m.get("role", "")}: {m.get("content", "")}' for m in known]


def _number(value: Json) -> str:
  return f'{value:.4g}' if isinstance(value, int | float) else str(value)
