"""Compiles a train step for other machines and reports its cost."""
