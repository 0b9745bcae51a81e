"""Commands that tell of runs and experiments."""
