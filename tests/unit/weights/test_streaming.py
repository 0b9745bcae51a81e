"""Weights are streamed: memory does not grow with their number, and a stop leaves no files."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from paxlite.checkpointing.checksums import damage, write_checksums
from paxlite.checkpointing.variables import stacked, stored_variables, write_variable
from paxlite.weights.commands import import_weights
from paxlite.weights.huggingface import header
from tests.support import runs

LAYERS = 24
LAYER_BYTES = 4 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512)
LARGEST = 4 * 16000 * 512
PEAK = """
import sys
from paxlite.weights.commands import {tool}
{tool}.main(sys.argv[1:])
status = open('/proc/self/status').read()
print('peak', int(status.split('VmHWM:')[1].split()[0]) * 1024)
"""


def write_llama(folder, layers: int) -> None:
  """Writes a Hugging Face folder of float32 zeros."""
  folder.mkdir()
  config = dict(
    model_type='llama', vocab_size=16000, hidden_size=512, intermediate_size=1536,
    num_hidden_layers=layers, num_attention_heads=8, max_position_embeddings=64,
    rms_norm_eps=1e-5, hidden_act='silu', tie_word_embeddings=True, torch_dtype='float32',
  )  # fmt: skip
  (folder / 'config.json').write_text(json.dumps(config))
  shapes = {'model.embed_tokens.weight': (16000, 512), 'model.norm.weight': (512,)}
  for i in range(layers):
    name = f'model.layers.{i}.'
    shapes |= {f'{name}self_attn.{p}_proj.weight': (512, 512) for p in 'qkvo'}
    shapes |= {f'{name}mlp.{p}_proj.weight': (1536, 512) for p in ('gate', 'up')}
    shapes[f'{name}mlp.down_proj.weight'] = (512, 1536)
    shapes |= {f'{name}{p}_layernorm.weight': (512,) for p in ('input', 'post_attention')}
  with (folder / 'model.safetensors').open('wb') as f:
    f.write(header({n: (s, np.dtype(np.float32)) for n, s in shapes.items()}))
    for shape in shapes.values():
      f.write(bytes(4 * int(np.prod(shape))))


def peak(tool: str, *flags: str) -> int:
  result = subprocess.run(
    [sys.executable, '-c', PEAK.format(tool=tool), *flags],
    env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)}, capture_output=True, text=True,
    check=True,
  )  # fmt: skip
  return int(result.stdout.split()[-1])


def write_stacked(folder, to) -> None:
  """Writes the weights of `folder` as a run with repeated layers does, in a stack of all layers."""
  shutil.copytree(folder, to)
  for first in sorted((to / 'state').glob('*.x_layers_0.*')):
    layers = [first.name.replace('x_layers_0', f'x_layers_{i}') for i in range(LAYERS)]
    stack = stacked([stored_variables(folder / 'state', '.')[name] for name in layers])
    write_variable(to / 'state', first.name.replace('x_layers_0', 'repeat'), stack.whole())
    for name in layers:
      shutil.rmtree(to / 'state' / name)
  write_checksums(to)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_layers(tmp_path):
  imports, exports = {}, {}
  for layers in (1, LAYERS):
    folder = tmp_path / str(layers)
    write_llama(folder, layers)
    imports[layers] = peak('import_weights', '--from=hf', f'--path={folder}', f'--to={folder}w')
    exports[layers] = peak(
      'export_weights', '--to=hf', f'--checkpoint={folder}w', f'--path={folder}hf'
    )
  write_stacked(tmp_path / f'{LAYERS}w', tmp_path / 'stacked')
  exports['stacked'] = peak(
    'export_weights', '--to=hf', f'--checkpoint={tmp_path / "stacked"}', f'--path={tmp_path / "hf"}'
  )
  model = LAYERS * LAYER_BYTES + LARGEST
  print(f'{model:,} bytes, largest {LARGEST:,}; import {imports}; export {exports}')
  for peaks in (imports, exports):
    assert max(peaks.values()) - peaks[1] < LARGEST / 2 < model / 8


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_import_that_is_stopped(number, tmp_path):
  """The destination does not exist afterwards; files that a SIGKILL leaves do not cause errors."""
  write_llama(tmp_path / 'hf', LAYERS)
  flags = ['--from=hf', f'--path={tmp_path / "hf"}', f'--to={tmp_path / "w"}']
  command = [sys.executable, '-m', 'paxlite', 'import', *flags]
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  process = runs.started(command, environment, stderr=subprocess.PIPE)
  unfinished = tmp_path / '.w.unfinished'
  while process.poll() is None and not (unfinished / 'state').exists():
    time.sleep(0.001)
  process.send_signal(number)
  errors = process.communicate()[1]
  assert process.returncode == {signal.SIGKILL: -number}.get(number, 128 + number), errors
  assert len(errors.splitlines()) <= 1
  assert unfinished.exists() == (number == signal.SIGKILL)
  assert not (tmp_path / 'w').exists()
  import_weights.main(flags)
  assert not unfinished.exists()
  assert damage(tmp_path / 'w') is None
