"""What is minimized: the cross-entropy, the z-loss, the losses of experts; metrics."""
