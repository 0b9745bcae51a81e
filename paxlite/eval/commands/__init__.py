"""Commands that evaluate."""
