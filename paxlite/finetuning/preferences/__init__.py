"""Training on preferences: pairs of answers, labelled ones, and reward models."""
