"""Losses (cross-entropy, z-loss, losses of experts) and metrics."""
