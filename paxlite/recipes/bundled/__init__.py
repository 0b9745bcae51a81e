"""Recipes that ship with paxlite: `paxlite recipe NAME` runs the one in the module NAME."""
