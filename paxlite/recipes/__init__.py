"""Recipes: files of stages that train one after the other, from a tokenizer to a chat model."""

from paxlite.recipes.dial import Chat
from paxlite.recipes.recipe import Files, Recipe, Stage

__all__ = ['Chat', 'Files', 'Recipe', 'Stage']
