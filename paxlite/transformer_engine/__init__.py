"""NVIDIA's Transformer Engine: its products and its fused layers, and their weights."""
