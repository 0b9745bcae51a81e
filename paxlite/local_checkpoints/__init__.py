"""Train states on each machine's own disk, for a quick start after a crash."""
