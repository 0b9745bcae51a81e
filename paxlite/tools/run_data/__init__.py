"""What `paxlite data RUN` shows: the texts of a step, spikes of the loss, comparisons and counts."""
