"""paxlite: Pax's way of training language models on today's JAX."""

__version__ = '0.1.0'
