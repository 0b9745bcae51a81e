"""Commands that write tokens and tokenizers."""
