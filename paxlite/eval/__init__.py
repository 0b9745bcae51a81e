"""Zero-shot tasks by log-likelihoods and by generated answers."""
