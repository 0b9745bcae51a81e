"""Inputs: from files to batches of token rows, in an order that (seed, step) determine."""
