"""Weights in other projects' formats: Hugging Face, Meta, GGUF and Pax."""
