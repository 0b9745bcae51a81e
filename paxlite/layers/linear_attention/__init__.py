"""Attention with a state instead of keys and values: delta rules, state spaces, convolutions."""
