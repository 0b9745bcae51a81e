"""Rollouts: episodes that the model generates, and their rewards, from which it learns."""
