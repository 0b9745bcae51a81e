"""Attention: the layer, its masks, its kernels, and their use over a mesh."""
