"""Trains small runs under a random schedule of faults, and compares them with undisturbed ones."""
