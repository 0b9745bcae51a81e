"""Weights in other projects' formats: Hugging Face, Meta and Pax, and GGUF to export."""
