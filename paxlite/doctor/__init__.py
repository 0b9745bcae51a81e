"""Examines this machine, and compares its kernels with plain XLA."""
