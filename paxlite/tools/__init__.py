"""The commands of `paxlite`, a module each; commands.py lists them."""
