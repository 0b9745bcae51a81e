"""Experiments by family, and the datasets that mix into them."""
