"""Checkpoints of Pax: paxlite continues a run of Pax."""

import json

import jax
import numpy as np
import pytest
import tensorstore

from paxlite.checkpointing.variables import stored_variables
from paxlite.core.errors import UserError
from paxlite.programs.launch import build_experiment
from paxlite.programs.run import Run
from tests.support import praxis
from tests.support.imported import flat, loaded, run_import

PAX_CASES = {
  'gpt2l': ('GPT126M', '--fdl.MODEL_DIMS=32'),
  'gpt2l_repeated': ('GPT5B', '--fdl.MODEL_DIMS=32'),
  'llama2l_mha': ('LLaMA7B', '--fdl.MODEL_DIMS=32', '--fdl.HIDDEN_DIMS=88',
                  '--fdl.USE_REPEATED_LAYER=False'),
}  # fmt: skip


def pax_flags(name: str) -> list[str]:
  experiment, *flags = PAX_CASES[name]
  sizes = dict(NUM_LAYERS=2, NUM_HEADS=4, VOCAB_SIZE=64, MAX_SEQ_LEN=16, FPROP_DTYPE='float32')
  return [f'--fdl_config={experiment}', *flags, *(f'--fdl.{k}={v}' for k, v in sizes.items())]


def write_compressed(folder, value: np.ndarray) -> None:
  """Writes a variable as paxml does: zarr v2, one chunk, zstd."""
  spec = {
    'driver': 'zarr',
    'kvstore': {'driver': 'file', 'path': str(folder)},
    'metadata': {
      'shape': value.shape, 'chunks': value.shape, 'dtype': value.dtype.str,
      'compressor': {'id': 'zstd', 'level': 1}, 'dimension_separator': '.',
    },
  }  # fmt: skip
  tensorstore.open(spec, create=True).result().write(value).result()


def write_pax(folder, reference: dict, moments: bool) -> None:
  """Writes a reference's parameters as a checkpoint of paxml; gradients take the moments' place."""

  def write(name: str, value: np.ndarray) -> None:
    write_compressed(folder / 'state' / name, value)

  repeated = any('/repeat/' in k for k in reference)
  for key, value in reference.items():
    kind, _, path = key.partition('/')
    name = path.replace('/', '.')
    if kind == 'params':
      write(f'mdl_vars.params.{name}', value)
    elif kind == 'grads' and moments:
      group = 'p_2_i-1' if '/repeat/' in path else 'no_prefix'
      prefix = f'opt_states_0.{group}_2' if repeated else 'opt_states_0_2'
      write(f'{prefix}.m.params.{name}', value)
      write(f'{prefix}.v.params.{name}', value**2)
      (folder / 'state' / f'{prefix}.count').exists() or write(
        f'{prefix}.count', np.array([7], np.int32)
      )
  write('step', np.array([7], np.uint32))


def state_of(folder, run_folder, experiment: str, flags: list[str]):
  """Returns the state and the step with which a run continues from a folder of weights."""
  overrides = dict(f.removeprefix('--fdl.').split('=', 1) for f in flags)
  overrides |= {
    'ICI_MESH_SHAPE': '[1,1,1]',
    'DCN_MESH_SHAPE': '[1,1,1]',
    'CHECKPOINT_RESTORE_PATH': str(folder),
    'CHECKPOINT_RESTORE_STATE': 'True',
  }
  return Run(build_experiment(experiment, [], overrides), run_folder).trainer().store.initial()


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('name', PAX_CASES)
def test_pax_parameters(name, tmp_path):
  reference = praxis.load(name)
  write_pax(tmp_path / 'checkpoint_00000007', reference, moments=False)
  run_import('pax', tmp_path / 'checkpoint_00000007', tmp_path / 'w', *pax_flags(name))
  _, model, params = loaded(tmp_path / 'w')
  batch = praxis.batch(reference)
  with jax.default_matmul_precision('highest'):
    logits = model.apply(
      {'params': params}, batch['ids'], batch['segment_pos'], batch['segment_ids']
    )
  np.testing.assert_allclose(logits, reference['logits'], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize('name', ['gpt2l', 'gpt2l_repeated'])
def test_a_pax_run_goes_on(name, tmp_path):
  """Step, counts and both moments of the state equal those of the Pax checkpoint."""
  reference = praxis.load(name)
  write_pax(tmp_path / 'checkpoint_00000007', reference, moments=True)
  run_import('pax', tmp_path / 'checkpoint_00000007', tmp_path / 'w', *pax_flags(name))
  kind = {'gpt2l': 'Synthetic126M', 'gpt2l_repeated': 'Synthetic5B'}[name]
  state, step = state_of(tmp_path / 'w', tmp_path / 'run', kind, pax_flags(name)[1:])
  assert step == 7
  assert int(state.opt_state[1].count) == 7
  grads = flat(praxis.tree(reference, 'grads'))
  for k, power in (('m', 1), ('v', 2)):
    for path, value in flat(getattr(state.opt_state[1], k)).items():
      np.testing.assert_array_equal(value, grads[path] ** power)


REAL = praxis.REFERENCE / 'pax_checkpoint.json'
REAL_FLAGS = [f'--fdl.{k}={v}' for k, v in dict(
  NUM_LAYERS=2, MODEL_DIMS=128, NUM_HEADS=2, VOCAB_SIZE=512, USE_BIAS=False, USE_FFN_BIAS=True,
  USE_SOFTMAX_BIAS=True, USE_PER_DIM_SCALE=True, TRAINABLE_POSITION_EMB=False,
).items()]  # fmt: skip


@pytest.fixture
def real(tmp_path):
  """All variables of a checkpoint that paxml wrote for Pax's base class, with random values."""
  rng = np.random.default_rng(0)
  values = {}
  for name, (dtype, shape) in json.loads(REAL.read_text()).items():
    values[name] = rng.normal(size=shape).astype(dtype)
    if name == 'step' or name.endswith('.count'):
      values[name] = np.full(shape, 5, dtype)
    write_compressed(tmp_path / 'checkpoint_00000005' / 'state' / name, values[name])
  return tmp_path / 'checkpoint_00000005', values


def test_a_checkpoint_that_paxml_wrote(real, tmp_path):
  path, values = real
  run_import('pax', path, tmp_path / 'w', '--fdl_config=GPT126M', *REAL_FLAGS)
  state, step = state_of(tmp_path / 'w', tmp_path / 'run', 'Synthetic126M', REAL_FLAGS)
  assert step == 5
  adam = state.opt_state[1]
  for prefix, tree in (
    ('mdl_vars.params', state.params),
    ('opt_states_0_2.m.params', adam.m),
    ('opt_states_0_2.v.params', adam.v),
  ):
    theirs = {
      k.removeprefix(f'{prefix}.').replace('.', '/'): v
      for k, v in values.items()
      if k.startswith(f'{prefix}.')
    }
    ours = flat(tree)
    assert len(ours) == len(theirs) == 26
    for name, value in theirs.items():
      value = value.T if name.endswith('logits_ffn/linear/w') else value
      name = 'logits_bias/b' if 'logits_ffn/bias' in name else praxis.our_path(name, tied=True)
      np.testing.assert_array_equal(ours.pop(name), value)


def test_what_does_not_fit_is_named_once(real, tmp_path):
  with pytest.raises(UserError) as e:
    run_import('pax', real[0], tmp_path / 'w', '--fdl_config=GPT126M', *REAL_FLAGS[:4])
  message = str(e.value)
  assert message.count('x_layers_0.self_attention.combined_qkv.b is missing') == 1
  assert 'lm.softmax.logits_ffn.bias.b is not in the model' in message
  assert not (tmp_path / 'w').exists()


def test_a_moment_alone_is_missed(real, tmp_path):
  name = 'opt_states_0_2.m.params.lm.final_ln.scale'
  (real[0] / 'state' / name / '.zarray').unlink()
  command = 'pax', real[0], tmp_path / 'w', '--fdl_config=GPT126M', *REAL_FLAGS
  with pytest.raises(
    UserError, match=r"Adam's m of lm\.final_ln\.scale is missing\. --params_only"
  ):
    run_import(*command)
  run_import(*command, '--params_only')
  stored = stored_variables(tmp_path / 'w' / 'state')
  assert len(stored) == 26
  assert all(name.startswith('params/') for name in stored)
  theirs = real[1]['mdl_vars.params.lm.final_ln.scale']
  np.testing.assert_array_equal(stored['params/final_ln/scale'].whole(), theirs)


def test_damaged_chunks_are_named(real, tmp_path):
  chunk = real[0] / 'state' / 'mdl_vars.params.lm.final_ln.scale' / '0'
  chunk.write_bytes(chunk.read_bytes()[:20])
  with pytest.raises(UserError, match=r'lm.final_ln.scale.0 cannot be read'):
    run_import('pax', real[0], tmp_path / 'w', '--fdl_config=GPT126M', *REAL_FLAGS)
  assert list(tmp_path.iterdir()) == [real[0]]
