"""Models and datasets of the Hugging Face Hub, by their names."""
