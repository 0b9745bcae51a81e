"""Checkpoints with checksums, and rules for restoring from other checkpoints."""
