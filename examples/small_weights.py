"""A Llama with random weights, which stands for published ones in finetune.py and lora.py.

It is written as Hugging Face's folders are, and imported with the command that imports those:

    paxlite import downloads/Llama-3.2-1B --from=hf --to=weights/llama
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
from safetensors.numpy import save_file

import paxlite

CONFIG = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'vocab_size': 8192,
  'max_position_embeddings': 256,
  'rms_norm_eps': 1e-5,
  'rope_theta': 10000.0,
  'hidden_act': 'silu',
  'tie_word_embeddings': True,
  'bos_token_id': 1,
  'eos_token_id': 2,
}


def imported(folder: pathlib.Path) -> str:
  """Returns the folder of the imported weights, which are made if they are not there yet."""
  weights = folder / 'imported'
  if not weights.exists():
    _write(folder / 'published')
    source, to = f'--path={folder / "published"}', f'--to={weights}'
    subprocess.run([sys.executable, '-m', 'paxlite', 'import', '--from=hf', source, to], check=True)
  return str(weights)


def _write(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  width, hidden = CONFIG['hidden_size'], CONFIG['intermediate_size']
  keys = width * CONFIG['num_key_value_heads'] // CONFIG['num_attention_heads']
  shapes = {'model.embed_tokens': (CONFIG['vocab_size'], width), 'model.norm': (width,)}
  for i in range(CONFIG['num_hidden_layers']):
    layer = f'model.layers.{i}'
    shapes |= {f'{layer}.{x}_layernorm': (width,) for x in ('input', 'post_attention')}
    shapes |= {f'{layer}.self_attn.{x}_proj': (width, width) for x in 'qo'}
    shapes |= {f'{layer}.self_attn.{x}_proj': (keys, width) for x in 'kv'}
    shapes |= {f'{layer}.mlp.{x}_proj': (hidden, width) for x in ('gate', 'up')}
    shapes[f'{layer}.mlp.down_proj'] = (width, hidden)
  draw = np.random.default_rng(0).normal
  tensors = {
    f'{name}.weight': np.ones(shape, np.float32)
    if len(shape) == 1
    else draw(0, 0.05, shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})
  (folder / 'config.json').write_text(json.dumps(CONFIG))
  vocabulary = pathlib.Path(paxlite.get('DemoGPT')().VOCAB_PATH)
  shutil.copy(vocabulary, folder / 'tokenizer.model')
