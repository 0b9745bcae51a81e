"""The generation engine, and models loaded from checkpoints."""
