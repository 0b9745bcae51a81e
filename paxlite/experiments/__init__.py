"""Experiments by family, and datasets as mixins for them."""

from paxlite import extensions

extensions.found()  # before `base`: a package may import Experiment before its own extension
