"""What is on this machine, and whether its kernels compute what plain XLA does."""
