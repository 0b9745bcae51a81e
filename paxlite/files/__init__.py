"""Text, JSON and compressed files, locks, and outputs that appear when they are complete."""
