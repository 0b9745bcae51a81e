"""A training API: clients train and sample adapters of their own on one base model."""
