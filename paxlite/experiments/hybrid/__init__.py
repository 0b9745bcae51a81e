"""Shared by hybrid models: layers with a state, and their attributes.

Delta rules, state spaces and convolutions have a state instead of keys and values. A family names
LayersWithState, Mamba2Layers or DeltaNetLayers as a base.
"""
