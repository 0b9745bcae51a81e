"""Tasks of reasoning-gym: ENVIRONMENT=paxlite.environments.reasoning_gym.ReasoningGym."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core.json_text import parsed
from paxlite.environments.sources import write_records


class ReasoningGym:
  """Scores the answers to tasks of reasoning-gym, each of one turn."""

  def __init__(self) -> None:
    import reasoning_gym  # noqa: F401  (when the environment is looked up, which may take longer)

  def reply(self, record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    return None

  def reward(self, record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> float:
    """Returns the task's score; 0 for an answer that it cannot read."""
    from reasoning_gym.utils import extract_answer

    given = record['reasoning_gym']
    dataset = _dataset(given['task'], json.dumps(given['options'], sort_keys=True))
    entry = dataset[given['index']]
    if parsed(json.dumps(entry, default=str)) != given['entry']:
      entry = given['entry']  # another version draws others
    said = messages[-1]['content'].rpartition('</think>')[2]
    answer = extract_answer(said)
    try:
      return float(dataset.score_answer(said.strip() if answer is None else answer, entry))
    except Exception:
      return 0.0


def write(task: str, options: Mapping[str, Any], path: str) -> None:
  """Writes the prompts of a task.

  Args:
    task: Its name.
    options: Those of its configuration, such as size and seed; and `prompt`: text, chat, or the
      name of a system prompt of reasoning-gym.
    path: The file.
  """
  from reasoning_gym.utils import SYSTEM_PROMPTS

  prompt = options.get('prompt', 'chat')
  if prompt not in (known := ['text', 'chat', *SYSTEM_PROMPTS]):
    raise ValueError(f'prompt={prompt} is unknown; use {", ".join(known)}')
  said = SYSTEM_PROMPTS.get(prompt)
  system = [] if said is None else [{'role': 'system', 'content': said}]
  # without a seed, reasoning-gym draws other tasks at each start
  own = {'seed': 0} | {name: value for name, value in options.items() if name != 'prompt'}
  dataset, records = _dataset(task, json.dumps(own, sort_keys=True)), []
  for index in range(len(dataset)):
    entry = dataset[index]
    asked = [*system, {'role': 'user', 'content': entry['question']}]
    records.append({
      'prompt': entry['question'] if prompt == 'text' else asked,
      'reasoning_gym': {'task': task, 'options': own, 'index': index, 'entry': entry},
    })  # fmt: skip
  write_records(path, records)


@functools.lru_cache(16)
def _dataset(task: str, options: str) -> Any:
  import reasoning_gym

  return reasoning_gym.create_dataset(task, **parsed(options))
