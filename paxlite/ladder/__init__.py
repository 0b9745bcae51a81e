"""Small models like an experiment's, which predict its loss."""
