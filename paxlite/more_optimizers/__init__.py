"""Optimizers beside Adam, AdamW and Muon: SOAP, and others of optax."""
