"""metrics.jsonl, TensorBoard, and services that receive metrics."""
