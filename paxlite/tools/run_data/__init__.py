"""What `paxlite data RUN` shows: texts of a step, spikes of the loss, comparisons and counts."""
