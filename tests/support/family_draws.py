"""python -m tests.support.family_draws [FAMILY…] [--draws=200] [--first=0]

Draws configurations of each family at random, sizes and options, and compares the logits of the
imported model with those of transformers, and these with those of its exported config.json. Prints
the largest difference of a family, as a share of its largest logit, and every draw that is above
1e-5.
"""

import importlib
import pathlib
import sys
import tempfile
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.weights import folder, huggingface
from paxlite.weights.families import config_json
from paxlite.weights.family_tables import FAMILIES
from tests.support.families import PACKAGES, draw_tables, register_mistral4
from tests.support.imported import nested, repeated, variables_of

LENGTH = 20
TOLERANCE = 1e-5
BUFFERS = ('e_score_correction_bias', 'layer_scalar')  # which a file has beside the parameters


def draw(kind: str, seed: int) -> dict[str, Any]:
  """Returns the arguments of a random config of a family."""
  return importlib.import_module(f'{PACKAGES[kind]}.cases').drawn(kind, seed)


def difference(kind: str, seed: int) -> float:
  """Returns the largest difference of the logits of a draw, as a share of the largest logit.

  The logits are those of the imported model, and those of transformers with the config.json of an
  export.
  """
  import torch
  import transformers

  torch.manual_seed(seed)
  register_mistral4()
  config = transformers.AutoConfig.for_model(kind, **draw(kind, seed))
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    biases = [b for name, b in model.named_buffers() if name.endswith(BUFFERS)]
    for tensor in [*model.parameters(), *biases]:
      tensor.add_(torch.randn_like(tensor) * 0.1)
    draw_tables(model)
    for name, tensor in model.named_parameters():
      if name.endswith('A_log'):  # states that last
        tensor.uniform_(-3, 0)
    ids = np.random.default_rng(seed).integers(3, 50, (2, LENGTH))
    expected = model(torch.tensor(ids)).logits.numpy()
  largest = np.abs(expected).max()
  with tempfile.TemporaryDirectory() as made:
    path = pathlib.Path(made)
    model.save_pretrained(path)
    experiment, entries, tensors = huggingface.read_folder(path)
    folder.check_tensors(entries, tensors.shapes, huggingface.IGNORED)
    variables = variables_of(entries, tensors.read)
  written = config_json(experiment, 'float32', None)
  config = transformers.AutoConfig.for_model(written.pop('model_type'), **written)
  back = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  back.load_state_dict(model.state_dict())
  with torch.no_grad():
    exported = np.abs(back(torch.tensor(ids)).logits.numpy() - expected).max()
  if experiment.ROPE_SCALING == 'longrope' and experiment.ROPE_ORIGINAL_LENGTH < LENGTH:
    experiment = experiment.replaced(MAX_SEQ_LEN=64)  # the factors for long rows
  is_linked = isinstance(experiment, LinkedStack) and experiment.has_links  # no layer is repeated
  ours = fdl.build(experiment.replaced(USE_REPEATED_LAYER=not is_linked).build_task()).model
  params = nested(variables if is_linked else repeated(variables))
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(ours.apply)({'params': params}, ids)
  return float(max(np.abs(logits - expected).max(), exported) / largest)


def main(arguments: list[str]) -> None:
  flags = dict(a.removeprefix('--').split('=') for a in arguments if a.startswith('--'))
  kinds = [a for a in arguments if not a.startswith('--')] or list(FAMILIES)
  first, draws = int(flags.get('first', 0)), int(flags.get('draws', 200))
  for kind in kinds:
    worst = 0.0
    for seed in range(first, first + draws):
      try:
        found = difference(kind, seed)
      except Exception as e:
        print(f'{kind} {seed}: {type(e).__name__}: {str(e)[:300]}', flush=True)
        continue
      worst = max(worst, found)
      if seed % 50 == 49:
        jax.clear_caches()
      if found > TOLERANCE:
        print(f'{kind} {seed}: {found:.2g} {draw(kind, seed)}', flush=True)
    print(f'{kind}: {draws} draws, {worst:.2g}', flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
