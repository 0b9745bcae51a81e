"""Experiments for tests."""

from paxlite.experiments.datasets import DocumentFiles, EmbeddedText, Mixture
from paxlite.experiments.demo import TinyGPT


class TinyText(EmbeddedText, TinyGPT):
  """TinyGPT on the embedded text, evaluated on two batches of it."""

  VOCAB_SIZE = 8192
  MAX_EVAL_BATCHES = 2
  SAMPLE_PROMPT = 'In the beginning'


class TinyMixture(Mixture, TinyGPT):
  """TinyGPT on several sources."""

  VOCAB_SIZE = 8192


class TinyDocuments(DocumentFiles, TinyGPT):
  """TinyGPT on documents."""

  VOCAB_SIZE = 8192
