"""Commands that describe runs and experiments."""
