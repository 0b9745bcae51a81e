"""Command lines, the terminal, and reports of errors in a user's own code."""
