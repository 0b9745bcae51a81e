"""Every family against transformers: logits, gradients, greedy text, and the way back."""

import copy
import tempfile

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from paxlite.experiments.deepseek_v4.blocks import EXPERTS_OF_IDS
from paxlite.experiments.gemma4.layers import FIXED
from paxlite.generation.engine import Engine
from paxlite.layers.moe.group_router import LOAD_BIAS
from paxlite.weights.commands import export_weights
from paxlite.weights.families import family_of, hugging_face_entries
from paxlite.weights.family_tables import FAMILIES
from tests.support import family_draws
from tests.support.families import CASES, theirs
from tests.support.imported import flat, loaded, nested, run_import, unrolled, variables_of

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

T = 24
# Most of what the other cases compute is in the first one.
FIRST = 'deepseek_v3'
# Latent attention with experts, a gated delta net, and windows.
FAST_FAMILIES = 'deepseek_v3', 'qwen3_5_text', 'gemma3_text'
# which no gradient moves, and which are no parameters there
NOT_LEARNED = (LOAD_BIAS, FIXED, EXPERTS_OF_IDS)
every_case = pytest.mark.parametrize('case', [FIRST, *(c for c in CASES if c != FIRST)])


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  """Returns a function that makes transformers' model of a case, imported, once."""
  made = {}

  def of(case: str):
    if case not in made:
      folder = tmp_path_factory.mktemp(case)
      model = theirs(case)
      model.save_pretrained(folder / 'hf')
      run_import('hf', folder / 'hf', folder / 'w')
      made[case] = (folder, model, *loaded(folder / 'w'))
    return made[case]

  return of


def ids_of(rows: int = 2) -> np.ndarray:
  return np.random.default_rng(0).integers(3, 96, (rows, T))


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('family', [*FAST_FAMILIES, *sorted({*FAMILIES} - {*FAST_FAMILIES})])
def test_random_configurations(family, seed):
  """`python -m tests.support.family_draws` compares as many as it is asked for."""
  assert family_draws.difference(family, seed) < family_draws.TOLERANCE


def test_every_family_has_a_case():
  named = {case.partition(' ')[0] for case in CASES}
  assert named >= set(FAMILIES) - {'llama', 'gemma', 'gpt2'}  # these are in test_weights.py


@pytest.mark.cases(fast=1, slow=1)
@every_case
def test_logits_and_gradients(case, imported):
  """The gradients are those of the mean cross-entropy, for every tensor of the folder.

  transformers computes both in float64, wherever it computes in the dtype of its parameters.
  """
  _, model, experiment, ours, params = imported(case)
  model = copy.deepcopy(model).double()
  if model._can_set_experts_implementation():
    model.set_experts_implementation('eager')  # its other products of experts have no float64
  ids = ids_of()
  logits_T = model(torch.tensor(ids)).logits
  loss = torch.nn.functional.cross_entropy(
    logits_T[:, :-1].flatten(0, 1), torch.tensor(ids[:, 1:]).flatten()
  )
  model.zero_grad()
  loss.backward()
  expected = logits_T.detach().numpy()

  def value(params):
    logits = ours.apply({'params': params}, ids)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)
    return -chosen.mean(), logits

  with jax.default_matmul_precision('highest'):
    (_, logits), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())

  found = unrolled(flat(grads))
  for name, wanted in _their_gradients(model, experiment).items():
    got = found.pop(name)
    scale = np.abs(wanted).max()
    if name.endswith('qkv/key/b') and not experiment.USE_ROTARY_POSITION_EMB:
      # what all keys of a row have in common changes no softmax: both are the rounding of 0
      assert max(scale, np.abs(got).max()) < 1e-7, name
      continue
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * scale + 1e-9, err_msg=name)
  assert all(name.endswith(NOT_LEARNED) for name in found), found.keys()
  assert not any(found[name].any() for name in found if name.endswith((FIXED, EXPERTS_OF_IDS)))


def test_long_rows_have_the_factors_for_long_rows(imported):
  """transformers chooses the factors by the length of the row, paxlite by MAX_SEQ_LEN."""
  folder, _, experiment, _, params = imported('phi3 longrope')
  assert experiment.MAX_SEQ_LEN == experiment.ROPE_ORIGINAL_LENGTH == 64
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / 'hf', attn_implementation='eager'
  )
  ids = np.random.default_rng(0).integers(3, 96, (2, 80))
  with torch.no_grad():
    expected = model(torch.tensor(ids)).logits.numpy()
  ours = fdl.build(experiment.replaced(MAX_SEQ_LEN=128).build_task()).model
  with jax.default_matmul_precision('highest'):
    logits = jax.jit(ours.apply)({'params': params}, ids)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@every_case
def test_packed_rows_of_an_unrolled_stack(case, imported):
  """Two texts in one row have the logits that each has alone, in a repeated stack."""
  _, _, experiment, repeated, params = imported(case)
  cut, ids = 10, ids_of(1)
  cls = type(experiment)
  task = cls(**experiment.values() | dict(USE_REPEATED_LAYER=False)).build_task()
  single = fdl.build(task).model
  positions = np.concatenate([np.arange(cut), np.arange(T - cut)])[None]
  segments = np.where(np.arange(T) < cut, 1, 2)[None]
  with jax.default_matmul_precision('highest'):
    of_single = jax.jit(lambda p: single.apply({'params': p}, ids, positions, segments))
    packed = of_single(nested(unrolled(flat(params))))
    alone = jax.jit(lambda p: repeated.apply({'params': p}, ids[:, :cut]))(params)
  np.testing.assert_allclose(packed[:, :cut], alone, atol=1e-5 * np.abs(alone).max())


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@every_case
def test_greedy_text_and_the_way_back(case, imported, tmp_path):
  """With the cache, and rows of different lengths; the exported tensors are those of the import.

  The text is greedy if each of its tokens is the one with the largest logit after those before it.
  """
  folder, _, experiment, ours, params = imported(case)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder / 'hf', attn_implementation='eager'
  )
  ids, new = ids_of(1).tolist(), 64 if case != 'phi3 longrope' else 40
  short = ids[0][: T // 2]
  engine = Engine(ours, params, experiment.MAX_SEQ_LEN)
  text = engine.continuations([ids[0], short], new)[0]
  assert len(text) == new
  with torch.no_grad():
    logits = model(torch.tensor([ids[0] + text[:-1]])).logits[0, T - 1 :]
  assert text == logits.argmax(-1).tolist()

  export_weights.main(['--to=hf', f'--checkpoint={folder / "w"}', f'--path={tmp_path / "back"}'])
  back = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'back', attn_implementation='eager'
  )
  assert type(back) is type(model)
  before, after = model.state_dict(), back.state_dict()
  assert before.keys() == after.keys()
  for name, tensor in after.items():
    assert torch.equal(tensor, before[name]), name
  # a tensor that a file maps into memory may be aligned otherwise, and torch then rounds otherwise
  for parameter in [*model.parameters(), *back.parameters()]:
    parameter.data = parameter.data.clone()
  with torch.no_grad():
    assert torch.equal(back(torch.tensor(ids)).logits, model(torch.tensor(ids)).logits)


def _their_gradients(model, experiment) -> dict[str, np.ndarray]:
  """Returns the gradients of transformers' model by the names of our variables."""
  for parameter in model.parameters():
    parameter.data = parameter.grad if parameter.grad is not None else parameter.data * 0
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    with safe_open(f'{folder}/model.safetensors', 'np') as f:
      stored = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
  tensors = {name.removeprefix('transformer.'): x for name, x in stored.items()}
  entries = FAMILIES[family_of(experiment)].found(hugging_face_entries(experiment), tensors)
  learned = [e for e in entries if not e.ours.endswith(NOT_LEARNED)]
  return variables_of(learned, tensors.__getitem__)
