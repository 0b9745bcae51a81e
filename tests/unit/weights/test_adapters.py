"""Adapters of peft: of families whose queries, keys and values are one tensor, too."""

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from paxlite.checkpointing.variables import Variable
from paxlite.core.errors import UserError
from paxlite.weights import huggingface
from paxlite.weights.lora import write_adapter
from tests.support.families import theirs
from tests.support.imported import nested, variables_of


def with_factors(folder, target: str):
  """Returns the experiment of a folder with random factors of LoRA, its model and parameters."""
  experiment, entries, tensors = huggingface.read_folder(folder)
  experiment = experiment.replaced(
    USE_LORA=True, LORA_RANK=2, LORA_TARGET_LAYERS=target, USE_REPEATED_LAYER=False
  )
  model = fdl.build(experiment.build_task()).model
  shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32))
  rng = np.random.default_rng(0)
  values = {
    name: rng.normal(size=x.shape).astype(np.float32) * 0.2
    for name, x in flat_shapes(meta.unbox(shapes)['params']).items()
  }
  return experiment, model, values | variables_of(entries, tensors.read)


def flat_shapes(tree):
  from paxlite.core.variable_names import path_name

  return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def written(to, experiment, values) -> None:
  read = lambda x: lambda index: x[index]
  variables = {n: Variable(x.shape, np.dtype('float32'), read(x)) for n, x in values.items()}
  write_adapter(to, experiment, variables, 'base', 'float32')


@pytest.mark.slow
def test_peft_computes_the_same_with_factors_of_a_packed_family(tmp_path):
  torch = pytest.importorskip('torch')
  peft = pytest.importorskip('peft')
  base = theirs('gpt_neox')
  base.save_pretrained(tmp_path / 'hf')
  experiment, model, values = with_factors(tmp_path / 'hf', 'mlp')
  written(tmp_path / 'adapter', experiment, values)
  ids = np.random.default_rng(0).integers(3, 96, (2, 20))
  with jax.default_matmul_precision('highest'):
    ours = jax.jit(model.apply)({'params': nested(values)}, ids)
  adapted = peft.PeftModel.from_pretrained(base, tmp_path / 'adapter')
  with torch.no_grad():
    wanted = adapted(torch.tensor(ids)).logits.numpy()
    adapted.disable_adapter_layers()
    plain = adapted(torch.tensor(ids)).logits.numpy()
  largest = np.abs(wanted).max()
  np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * largest)
  assert np.abs(wanted - plain).max() > 0.1 * largest


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize(
  ('family', 'target', 'message'),
  [
    ('gpt_neox', 'attention', 'query_key_value.weight of a gpt_neox holds several weights'),
    ('phi3', 'attention', 'qkv_proj.weight of a phi3 holds several weights'),
    ('phi3', 'mlp', 'gate_up_proj.weight of a phi3 holds several weights'),
  ],
)
def test_factors_of_a_part_of_a_tensor_are_refused(tmp_path, family, target, message):
  pytest.importorskip('transformers')
  theirs(family).save_pretrained(tmp_path / 'hf')
  experiment, _, values = with_factors(tmp_path / 'hf', target)
  with pytest.raises(UserError, match=message) as e:
    written(tmp_path / 'adapter', experiment, values)
  assert '\n' not in str(e.value)
