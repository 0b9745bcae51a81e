"""Fine-tuning: what a frozen model makes of the data, once before training."""
