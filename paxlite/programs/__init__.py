"""The programs of `paxlite.main`: train, evaluate, decode."""
