"""Datasets of tokens are made of text, and tokenizers; the core reads both."""
