"""A Hub on loopback, and programs that know no other."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from paxlite.data import packaged
from tests.support.hub_server import hub_server

_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
VARIABLES = 'HF_HUB_OFFLINE', 'HF_TOKEN', 'HF_HUB_CACHE', 'HF_TOKEN_PATH', 'HF_DEBUG'


@pytest.fixture
def hub(monkeypatch, tmp_path):
  """The state of a Hub that this process and its children ask, with empty caches."""
  constants = pytest.importorskip('huggingface_hub.constants')
  from paxlite.hub import datasets, listing, models

  with hub_server() as found:
    for name in VARIABLES:
      monkeypatch.delenv(name, raising=False)
    home = tmp_path / 'home'
    for name, value in dict(
      HF_ENDPOINT=found.address, HF_HOME=home, XDG_CACHE_HOME=tmp_path / 'cache',
      HF_HUB_DISABLE_XET=1, HF_HUB_DISABLE_TELEMETRY=1,
    ).items():  # fmt: skip
      monkeypatch.setenv(name, str(value))
    template = found.address + '/{repo_id}/resolve/{revision}/{filename}'
    for name, value in dict(
      ENDPOINT=found.address, HUGGINGFACE_CO_URL_TEMPLATE=template, HF_HUB_DISABLE_XET=True,
      HF_HUB_OFFLINE=False, HF_TOKEN_PATH=str(home / 'token'), HF_HUB_CACHE=str(home / 'hub'),
      HF_STORED_TOKENS_PATH=str(home / 'stored'),
    ).items():  # fmt: skip
      monkeypatch.setattr(constants, name, value)  # as an import of the package reads them
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    for cached in (listing.listing_of, models.imported, datasets.files_of):
      cached.cache_clear()
    yield found


def tiny_llama(seed: int = 0) -> dict[str, bytes]:
  """Returns the files of a Llama with random weights and a tokenizer, as transformers has them."""
  safetensors = pytest.importorskip('safetensors.numpy')
  rng, width, inner = np.random.default_rng(seed), 32, 48
  tensors = {'model.embed_tokens.weight': (8192, width), 'lm_head.weight': (8192, width)}
  for i in range(2):
    layer = f'model.layers.{i}'
    for name in 'qkvo':
      tensors[f'{layer}.self_attn.{name}_proj.weight'] = (width, width)
    tensors[f'{layer}.mlp.gate_proj.weight'] = (inner, width)
    tensors[f'{layer}.mlp.up_proj.weight'] = (inner, width)
    tensors[f'{layer}.mlp.down_proj.weight'] = (width, inner)
    tensors[f'{layer}.input_layernorm.weight'] = (width,)
    tensors[f'{layer}.post_attention_layernorm.weight'] = (width,)
  tensors['model.norm.weight'] = (width,)
  values = {
    name: (rng.normal(size=shape) * 0.02 + (len(shape) == 1)).astype(np.float32)
    for name, shape in tensors.items()
  }
  config = dict(
    _SIZES, model_type='llama', architectures=['LlamaForCausalLM'], vocab_size=8192,
    num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-6, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=False, hidden_act='silu', rope_theta=10000.0,
    torch_dtype='float32',
  )  # fmt: skip
  return {
    'config.json': json.dumps(config).encode(),
    'tokenizer_config.json': b'{"tokenizer_class": "LlamaTokenizer"}',
    'tokenizer.model': pathlib.Path(packaged.VOCAB).read_bytes(),
    'model.safetensors': safetensors.save(values),
  }


def nothing_half(home: pathlib.Path, right: dict[str, bytes]) -> None:
  """Checks that every copy that a program would read is right."""
  for folder in home.glob('hub/*/snapshots/*'):
    for name, content in right.items():
      if (folder / name).exists():
        assert (folder / name).read_bytes() == content, name


def forget(home: pathlib.Path) -> None:
  from paxlite.hub import listing

  shutil.rmtree(home, ignore_errors=True)
  listing.listing_of.cache_clear()
