"""Command-line tools: `python -m paxlite.tools.NAME --help`."""
