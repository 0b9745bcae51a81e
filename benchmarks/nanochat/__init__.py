"""paxlite beside nanochat: see __main__.py."""
