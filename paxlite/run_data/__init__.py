"""The data of a run: recorded by the run, shown by `paxlite data`, and left out on request."""
