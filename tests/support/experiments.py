"""Experiments for tests."""

import os
import time

import fiddle as fdl

from paxlite.data import packaged
from paxlite.data.text import TextRows
from paxlite.experiments.datasets import DocumentFiles, EmbeddedText, FlatTokens, Mixture, SftFiles
from paxlite.experiments.demo import TinyGPT


class TinyText(EmbeddedText, TinyGPT):
  """TinyGPT on the embedded text, evaluated on two batches of it."""

  VOCAB_SIZE = 8192
  MAX_EVAL_BATCHES = 2
  SAMPLE_PROMPT = 'In the beginning'


class SlowRows(TextRows):
  """Rows that arrive slowly until Slurm has restarted the job, so that a fault can interrupt it."""

  def read(self, indices):
    if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':
      time.sleep(0.8)
    return super().read(indices)


class SlowText(TinyText):
  """TinyText with SlowRows."""

  def train_input(self):
    cfg = super().train_input()
    fdl.update_callable(cfg.source, SlowRows)
    return cfg


class TinyTokens(FlatTokens, TinyGPT):
  """TinyGPT on flat tokens."""


class TinySft(SftFiles, TinyGPT):
  """TinyGPT on prompts and answers."""

  VOCAB_SIZE = 8192
  VOCAB_PATH = packaged.VOCAB
  MAX_STEPS = 2


class TinyMixture(Mixture, TinyGPT):
  """TinyGPT on several sources."""

  VOCAB_SIZE = 8192


class TinyDocuments(DocumentFiles, TinyGPT):
  """TinyGPT on documents."""

  VOCAB_SIZE = 8192
