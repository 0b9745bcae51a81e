"""The base class of experiments with a language model."""

from paxlite.experiments.backend import Backends


class LanguageModel(Backends):
  """A decoder-only transformer on any backend, trained with Pax's Adam."""
