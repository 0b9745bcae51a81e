"""How products of activations and weights are computed, and by which backend."""
