"""Low-rank factors of frozen weights (LoRA, DoRA), and trained rows of tables."""
