"""The world of Pax: its GPU scripts, their experiments, and SeqIO tasks."""
