"""An installed package that adds a command, a scheme, an attribute, an optimizer, a callback."""
