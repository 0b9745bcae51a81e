"""Optimizers besides Adam, AdamW and Muon: SOAP, and others from optax."""
