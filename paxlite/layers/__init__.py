"""Flax Linen layers, which are composed with templates.

Shape letters in the names of arrays, in every file of paxlite (a test checks the names):

    B rows of a batch        T length                  S length of the keys
    D width of the model     F hidden width            V vocabulary
    N query heads, K · G     K key/value heads         G query heads of a key/value head
    H width of a head        A the three arrays of combined queries, keys and values
    L layers                 Z stages of a pipeline    I parts that are computed in turn
    E experts                C slots of an expert      P slots of all experts, E · C
    J groups of tokens       M tokens of a group       X experts of a token
    R rows, one for each expert of a token             Q parts of the rows of a microbatch
    U positions that are scored                        W continuations that are compared

A small letter is a part of a dimension: b is the rows of a microbatch, n the layers of a stage. In
a pipeline, t counts its ticks.

Parameters that are trained are float32; activations have the module's `dtype`. Norms, softmax and
loss are computed in float32. Dropout is on if and only if the caller passes a 'dropout' RNG.
"""
