"""Stands for the package mpi4py, as far as JAX asks it. The processes share a folder."""
