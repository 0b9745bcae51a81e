"""Services that compare runs."""
