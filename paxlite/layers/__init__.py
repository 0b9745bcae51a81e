"""Flax Linen layers, composed through templates.

Shape letters, in every file here: B batch, T length (S: that of the keys), D model width, N heads,
G key/value heads, H head dimension, F hidden width, V vocabulary, K the 3 of combined QKV, L
layers.

Parameters are float32; activations have the module's `dtype`. Norms, softmax and loss compute in
float32. Dropout is on exactly when the caller passes a 'dropout' RNG.
"""
