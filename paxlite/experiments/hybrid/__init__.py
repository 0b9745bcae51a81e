"""What hybrid models share: layers with a state beside attention, and the attributes of them.

Delta rules, state spaces and convolutions have a state instead of keys and values. A family names
LayersWithState, Mamba2Layers or DeltaNetLayers as a base.
"""
