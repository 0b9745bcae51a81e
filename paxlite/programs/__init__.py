"""What `paxlite.main` does with an experiment: train, evaluate, decode."""
