"""Inputs: from files to batches of token rows, in an order that is a pure function of (seed, step)."""
