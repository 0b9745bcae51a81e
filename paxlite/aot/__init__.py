"""Compiles a train step for machines that are not there, and says what it costs."""
