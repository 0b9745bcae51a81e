"""A server of the training API as a process, with a tiny model of random weights."""

import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from paxlite.data import packaged
from paxlite.files.text_files import read_text
from tests.support import runs

VOCABULARY, LENGTH, NAME = 400, 512, 'tiny/Llama-Base'
KEY = 'tml-of-the-tests'


def write_model(folder: pathlib.Path) -> None:
  """Writes a Llama with a tokenizer to FOLDER/hf, and imports it to FOLDER/base."""
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  from tokenizers import ByteLevelBPETokenizer

  from paxlite.weights.commands import import_weights

  bpe = ByteLevelBPETokenizer()
  text = read_text(packaged.TEXTS[0])[:200_000]
  bpe.train_from_iterator([text], vocab_size=VOCABULARY, special_tokens=['<s>', '</s>'])
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0,
    eos_token_id=1, initializer_range=0.2,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(folder / 'hf')
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe._tokenizer, bos_token='<s>', eos_token='</s>'
  )
  tokenizer.save_pretrained(folder / 'hf')
  import_weights.main([str(folder / 'hf'), f'--to={folder / "base"}'])


class TrainingServer:
  """A process of `paxlite serve --train`.

  Args:
    folder: That of write_model. Adapters are saved to FOLDER/adapters.
    flags: Further flags.
    key: The key of clients.
  """

  def __init__(self, folder: pathlib.Path, *flags: str, key: str = KEY):
    self.adapters = folder / 'adapters'
    command = [
      sys.executable, '-m', 'paxlite', 'serve', str(folder / 'base'), '--port=0', '--train',
      f'--folder={self.adapters}', f'--name={NAME}', '--dtype=float32', *flags,
    ]  # fmt: skip
    self.log = tempfile.TemporaryFile('w+')  # noqa: SIM115
    self.process = runs.started(
      command, runs.environment() | {'PAXLITE_API_KEY': key}, stdout=subprocess.PIPE,
      stderr=self.log.fileno(),
    )  # fmt: skip
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    assert ' answers at ' in line, self.logged()
    self.url = line.strip().split(' answers at ')[1]

  def client(self, key: str = KEY) -> Any:
    """Returns a ServiceClient of the package tinker."""
    import tinker

    return tinker.ServiceClient(base_url=self.url, api_key=key)

  def logged(self) -> str:
    self.log.seek(0)
    return self.log.read()

  def end(self) -> int:
    self.process.send_signal(signal.SIGTERM)
    return self.process.wait(60)
