"""Finds the mesh and the batch that fit a machine and are fastest."""
