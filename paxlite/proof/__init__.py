"""Proofs that a run did what its program says, and that an export is the model of a run."""
