"""The cache of keys and values, and sampling."""
