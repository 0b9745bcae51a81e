"""Engines of one model that share their programs, which would be traced again for each engine."""

from typing import Any

from paxlite.generation.engine import Engine
from paxlite.generation.programs import Programs

_PROGRAMS: dict[tuple, tuple[Any, Programs]] = {}  # with their models, whose ids stay theirs


def engine_of(model: Any, params: Any, max_length: int, *args: Any, **options: Any) -> Engine:
  """Returns Engine(…) with the programs of the first engine that was made alike."""
  engine = Engine(model, params, max_length, *args, **options)
  assert not {'mesh', 'is_token', 'kv_cache_dtype'} & options.keys(), 'programs depend on them'
  drafts = options.get('drafts', False)
  key = id(model), drafts, drafts and max_length, options.get('tracks_experts', False)
  _, engine._programs = _PROGRAMS.setdefault(key, (model, engine._compiled))
  return engine
