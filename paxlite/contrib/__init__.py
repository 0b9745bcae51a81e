"""Pax's scripts for GPUs, and their experiments."""
