"""Commands that read and write weights of others."""
