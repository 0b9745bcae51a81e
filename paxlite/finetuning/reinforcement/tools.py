"""Python functions that a model may call: their schemas, and the answers to its calls.

A schema follows from the signature, the annotations and the docstring of a function. This module
runs in the processes of the user's code (user_processes.py).
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxlite.cli.user_modules import import_named
from paxlite.core.json_text import parsed
from paxlite.generation.tool_calls import parted

_TYPES = {
  str: 'string', int: 'integer', float: 'number', bool: 'boolean', list: 'array', dict: 'object'
}  # fmt: skip
_ARGUMENT = re.compile(r'\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)')  # of a docstring: "name: text"


def schemas(paths: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the schemas of functions, named by dotted paths, in the form of chat templates."""
  functions = _functions(paths)
  for path, function in zip(paths, functions, strict=True):
    _check(path, function)
  found = [schema(function) for function in functions]
  names = [tool['function']['name'] for tool in found]
  if twice := {name for name in names if names.count(name) > 1}:
    raise ValueError(f'two TOOLS are called {min(twice)}')
  return found


def _check(path: str, function: Callable[..., Any]) -> None:
  """Raises ValueError if no call of a function could have a result."""
  if inspect.iscoroutinefunction(function):
    raise ValueError(f'{path} is async, which is not supported: write a plain function')
  for parameter in inspect.signature(function).parameters.values():
    if parameter.kind is parameter.POSITIONAL_ONLY:
      raise ValueError(f'{path}: {parameter.name} has no name in a call: leave the / out')


def schema(function: Callable[..., Any], name: str = '') -> dict[str, Any]:
  """Returns the JSON schema of a function, with what its docstring says of it."""
  hints = typing.get_type_hints(function)
  about, explained = _explained(inspect.getdoc(function) or '')
  properties, required = {}, []
  for parameter in inspect.signature(function).parameters.values():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      continue
    said = explained.get(parameter.name)
    kind = _type(hints.get(parameter.name, Any))
    properties[parameter.name] = {**kind, **({'description': said} if said else {})}
    if parameter.default is parameter.empty:
      required.append(parameter.name)
  parameters = {'type': 'object', 'properties': properties, 'required': required}
  described = {'name': name or function.__name__, 'description': about, 'parameters': parameters}
  return {'type': 'function', 'function': described}


def calls(answer: str, names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
  """Returns the calls of these functions in an answer: names and arguments. Thinking has none."""
  found = parted([answer.rpartition('</think>')[2]], names)[1]
  each = [call['function'] for call in found if isinstance(call['function'], dict)]
  return [(str(call['name']), parsed(str(call['arguments']))) for call in each]


def reply(messages: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[Any] | None:
  """Returns the results of the calls in the last message; None if it has none.

  What a function raises is the result of its call.
  """
  functions = {function.__name__: function for function in _functions(paths)}
  asked = calls(messages[-1]['content'], [*functions])
  found = []
  for name, arguments in asked:
    try:
      result = functions[name](**arguments)
    except Exception as e:
      result = f'error: {type(e).__name__}: {e}'
    found.append((name, result))
  return [message(i, *one) for i, one in enumerate(found)] or None


def message(number: int, name: str, result: object) -> dict[str, Any]:
  """Returns the message with the result of a call; what is no text is written as JSON."""
  text = result if isinstance(result, str) else json.dumps(result, default=str)
  text = text.encode(errors='replace').decode()  # half of a surrogate pair has no token
  return {'role': 'tool', 'name': name, 'tool_call_id': f'call_{number}', 'content': text}


def _functions(paths: Sequence[str]) -> list[Callable[..., Any]]:
  parts = [path.rpartition('.') for path in paths]
  return [getattr(import_named(module), name) for module, _, name in parts]


def _explained(docstring: str) -> tuple[str, dict[str, str]]:
  """Returns what a docstring says of a function, and of its arguments below "Args:"."""
  about, _, below = docstring.partition('\nArgs:\n')
  found: dict[str, str] = {}
  name = ''
  for line in below.splitlines():
    if line and not line[0].isspace():
      break  # another section
    if match := _ARGUMENT.fullmatch(line):
      name, found[match[1]] = match[1], match[2]
    elif name and line.strip():
      found[name] += f' {line.strip()}'
  return re.split(r'\n(?:Returns|Raises|Yields):\n', about)[0].strip(), found


def _type(hint: Any) -> dict[str, Any]:
  """Returns the JSON schema of an annotation; {} allows anything."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated:
    return _type(arguments[0])
  if origin is typing.Literal:
    return {'enum': [*arguments]}
  if origin in (typing.Union, types.UnionType):
    some = [_type(each) for each in arguments if each is not type(None)]
    return some[0] if len(some) == 1 else {'anyOf': some}
  if origin in (list, tuple, set, Sequence) and arguments:
    return {'type': 'array', 'items': _type(arguments[0])}
  if origin in (dict, Mapping) and len(arguments) == 2:
    return {'type': 'object', 'additionalProperties': _type(arguments[1])}
  kind = _TYPES.get(origin or hint)
  return {'type': kind} if kind else {}
