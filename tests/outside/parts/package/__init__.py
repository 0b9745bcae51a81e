"""An installed package that adds a command, a scheme of paths, an attribute and a callback."""
