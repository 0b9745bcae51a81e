"""Errors, arrays, names of variables and safe files: what every other room uses."""
