"""A run whose folder is in an object store: its lease, its mirror, and its failures."""
