"""Small models of an experiment's kind, and what they predict of the experiment."""
