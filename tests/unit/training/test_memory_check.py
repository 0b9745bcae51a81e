"""A program that needs more memory than there is is refused before it takes the memory."""

import time

import jax
import jax.numpy as jnp
import pytest

from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.training import step_compiler
from paxlite.training.memory_check import MemoryCheck
from tests.support import runs


@pytest.fixture
def mesh():
  return jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])


@pytest.fixture
def left(monkeypatch):
  """Sets the number of free bytes on the machine."""
  return lambda count: monkeypatch.setattr(host_memory, 'available', lambda: count)


def sharded(*shape):
  """Returns an array of which each of two devices has half."""
  axes = jax.sharding.AbstractMesh((2,), ('data',))
  sharding = jax.sharding.NamedSharding(axes, jax.sharding.PartitionSpec('data'))
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_a_state_that_does_not_fit(mesh, left, capfd):
  state, trainable = {'m': sharded(500, 2), 'p': sharded(500)}, sharded(500)
  check = MemoryCheck(mesh)
  needed = (500 * 3 + 500) * 4 // 2
  left(needed * 2)
  check.state(state, trainable)
  assert capfd.readouterr().err == ''
  left(needed)
  check.state(state, trainable)
  said = capfd.readouterr().err
  assert 'Little memory is left: parameters, optimizer and gradients need 4 kB, but 4 kB ' in said
  left(needed - 1)
  with pytest.raises(UserError, match=r'need 4 kB, but 4 kB .* --nocheck_memory'):
    check.state(state, trainable)
  MemoryCheck(mesh, enabled=False).state(state, trainable)
  left(None)  # where the free memory is unknown
  check.state(state, trainable)


def test_a_step_that_does_not_fit(mesh, left):
  x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  compiled = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(x).compile()
  needed = compiled.memory_analysis().temp_size_in_bytes
  assert needed >= 256 * 256 * 4
  left(2 * needed)
  MemoryCheck(mesh).step(compiled)
  left(needed - 1)
  with pytest.raises(UserError, match=r'for activations and gradients, .* CHECKPOINT_POLICY'):
    MemoryCheck(mesh).step(compiled)


def test_pipelined_collectives_are_given_up_for_memory(monkeypatch):
  """What is given up is only what paxlite has chosen to save time."""
  compiled = []

  class Memory:
    def step(self, options):
      if 'xla_gpu_pipeline_all_gather' in options:
        raise UserError('too little memory')

  def compile_lowered(lowered, options):
    compiled.append(dict(options))
    return options

  monkeypatch.setattr(step_compiler, 'compile_lowered', compile_lowered)
  pipelined = {
    'xla_gpu_pipeline_all_gather': 'COLLECTIVE_PIPELINING_MODE_ON',
    'xla_gpu_enable_while_loop_double_buffering': True,
  }
  kept, done = step_compiler.StepCompiler(Memory(), pipelined)(None, (None, None))
  assert kept == {'xla_gpu_enable_while_loop_double_buffering': True}
  assert compiled == [pipelined, kept]
  assert 'without pipelined collectives' in done
  monkeypatch.setattr(Memory, 'step', lambda *_: (_ for _ in ()).throw(UserError('too little')))
  with pytest.raises(UserError, match='too little'):
    step_compiler.StepCompiler(Memory(), kept)(None, (None, None))
  assert len(compiled) == 3, 'there is nothing to give up'


@pytest.mark.slow
def test_a_run_is_refused_before_it_takes_the_memory(tmp_path, left):
  left(10_000)
  with pytest.raises(UserError, match='parameters, optimizer and gradients need'):
    train(Run(TinyGPT(MAX_STEPS=2), tmp_path / 'state'))
  left(3_000_000)  # the state fits
  with pytest.raises(UserError, match=r'a step needs .* for activations and gradients'):
    train(Run(TinyGPT(MAX_STEPS=2, PERCORE_BATCH_SIZE=64), tmp_path / 'step'))
  assert not (tmp_path / 'step' / 'checkpoints').exists()
  tried = Run(TinyGPT(MAX_STEPS=2, PERCORE_BATCH_SIZE=64), tmp_path / 'tried', check_memory=False)
  train(tried)


def test_an_ordinary_mistake_ends_in_seconds(tmp_path):
  began = time.monotonic()
  flags = '--fdl.USE_LORA=True', '--fdl.LORA_RANK=100000000'
  refused = runs.run(tmp_path, *flags, code=2).stderr.splitlines()[-1]
  assert refused.startswith('error: parameters, optimizer and gradients need 1.84 TB, but ')
  assert time.monotonic() - began < 60
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.slow
def test_rows_that_are_too_long_end_in_seconds(tmp_path):
  """Attention over 65,536 tokens needs hundreds of GB; none of it is allocated."""
  sizes = '--fdl.MAX_SEQ_LEN=65536', '--fdl.NUM_HEADS=8', '--fdl.NUM_LAYERS=2'
  began = time.monotonic()
  refused = runs.run(tmp_path, *sizes, '--fdl.MODEL_DIMS=64', code=2).stderr.splitlines()[-1]
  assert refused.startswith('error: a step needs ')
  assert time.monotonic() - began < 120
