"""Options of XLA, compiled steps in files, and the compilation cache."""
