"""Names of Pax, MaxText, transformers, TRL and seqax, and what they are called here."""
