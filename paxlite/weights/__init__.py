"""Weights in the formats of others: Hugging Face, Meta, GGUF and Pax."""
