"""Experiments by family, and datasets as mixins for them."""
