"""Fewer bits: of products (FP8, int8), frozen weights (int8, int4, NF4) and moments (int8)."""
