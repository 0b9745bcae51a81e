"""Low-rank factors beside frozen weights (LoRA, DoRA), and rows of tables that are trained."""
