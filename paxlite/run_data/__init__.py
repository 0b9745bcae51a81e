"""The data of a run: its notes on them, and what `paxlite data` shows of them or leaves out."""
