"""An installed package that adds a command, an attribute and a callback to paxlite."""
