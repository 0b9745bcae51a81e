"""The data of a run: its notes on them, and what `paxlite data RUN` reads again or leaves out."""
