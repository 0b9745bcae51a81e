"""The engine that generates, and the model of a checkpoint that it generates with."""
