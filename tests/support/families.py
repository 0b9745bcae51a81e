"""Tiny models of every family in transformers, with all options of the family in use."""

import copy
import importlib.util
import json
import pathlib
import pkgutil

from paxlite import experiments
from paxlite.weights.family_tables import FAMILIES

# The package of each family, by model_type, and what its module `cases` has.
PACKAGES: dict[str, str] = {}
ON_MESHES: dict[str, dict] = {}
TOLERANCES: dict[str, float] = {}
OVER_CONTEXT: set[str] = set()
REFUSED: dict[str, tuple[str, dict]] = {}
PUBLISHED: dict[str, dict] = {}
_found: dict[str, dict] = {}
for found in pkgutil.iter_modules(experiments.__path__, 'paxlite.experiments.'):
  if found.ispkg and importlib.util.find_spec(f'{found.name}.cases'):
    cases = importlib.import_module(f'{found.name}.cases')
    tables = importlib.import_module(f'{found.name}.weights')
    PACKAGES |= dict.fromkeys(tables.FAMILIES, found.name)
    _found |= cases.CASES
    ON_MESHES |= getattr(cases, 'ON_MESHES', {})
    TOLERANCES |= getattr(cases, 'TOLERANCES', {})
    if (path := pathlib.Path(cases.__file__).with_name('published.json')).exists():
      PUBLISHED |= json.loads(path.read_text('utf-8'))
    REFUSED |= getattr(cases, 'REFUSED', {})
    OVER_CONTEXT.add(getattr(cases, 'OVER_CONTEXT', ''))
_places = [*FAMILIES]
# The first word is the model_type.
CASES = dict(sorted(_found.items(), key=lambda case: _places.index(case[0].partition(' ')[0])))


def register_mistral4() -> None:
  """Lets AutoModelForCausalLM find Mistral 4, whose class transformers 5.24 has, but not there."""
  import transformers

  config, model = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
  transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)


def theirs(case: str, seed: int = 0, **changes):
  """Returns transformers' model of a case in float32, with random values everywhere."""
  import torch
  import transformers

  torch.manual_seed(seed)
  register_mistral4()
  given = copy.deepcopy(CASES[case] | changes)  # transformers writes into dicts
  config = transformers.AutoConfig.for_model(case.partition(' ')[0], **given)
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
  with torch.no_grad():
    for tensor in [
      *model.parameters(),
      *(b for n, b in model.named_buffers() if 'correction' in n or 'layer_scalar' in n),
    ]:
      tensor.add_(torch.randn_like(tensor) * 0.1)
    draw_tables(model)
    for name, tensor in model.named_parameters():
      if name.endswith('A_log'):  # states that last: otherwise a token sees little but itself
        tensor.uniform_(-3, 0)
  return model


def draw_tables(model) -> None:
  """Gives each token id different experts at random, where a table has them."""
  import torch

  for name, table in model.named_buffers():
    if name.endswith('tid2eid'):
      experts = model.config.n_routed_experts
      table.copy_(torch.rand(len(table), experts).topk(table.shape[1]).indices)


def experiment(case: str, **changes):
  """Returns the experiment of a case."""
  import transformers

  from paxlite.weights.families import experiment_of

  given = copy.deepcopy(CASES[case] | changes)  # transformers writes into dicts
  config = transformers.AutoConfig.for_model(case.partition(' ')[0], **given)
  return experiment_of(config.to_dict(), pathlib.Path('config.json'))
