"""Errors, arrays, variable names and safe files, used by every other room."""
