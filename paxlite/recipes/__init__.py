"""Recipes: files of stages that train one after the other, from a tokenizer to a chat model."""

from paxlite.recipes.recipe import Files, Recipe, Stage

__all__ = ['Files', 'Recipe', 'Stage']
