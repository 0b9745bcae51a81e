"""Small models of an experiment's kind, and what they foretell about the experiment."""
