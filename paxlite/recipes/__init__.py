"""Recipes: files of stages that train one after the other, from a tokenizer to a chat model."""

from typing import TYPE_CHECKING, Any

from paxlite.recipes.recipe import Files, Recipe, Stage

if TYPE_CHECKING:
  from paxlite.recipes.dial import Chat

__all__ = ['Chat', 'Files', 'Recipe', 'Stage']


def __getattr__(name: str) -> Any:
  """Returns Chat, whose module loads JAX: the command line imports this package without it."""
  if name != 'Chat':
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from paxlite.recipes.dial import Chat

  return Chat
