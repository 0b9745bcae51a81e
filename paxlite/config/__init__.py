"""UPPER_CASE attributes with types and bounds, and templates of modules."""
