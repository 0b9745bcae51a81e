"""Options of XLA, and the memory that a run keeps on CPU."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from paxlite.compilation import compiler
from paxlite.parallel import devices
from paxlite.processes import cpu_memory
from tests.support import runs

OVERLAP = 'xla_gpu_experimental_parallel_collective_overlap_limit'
TINY = ['--fdl.MAX_STEPS=2', '--noenable_checkpoint_saving']


def test_flags_of_the_environment_come_first(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  assert compiler.initial_values_options('cpu') == {'xla_backend_optimization_level': 1}
  assert compiler.initial_values_options('cuda') == {}
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=3')
  assert compiler.initial_values_options('cpu') == {}


def test_options_for_several_gpus_come_after_those_given(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  monkeypatch.setattr(compiler, '_is_known', lambda name, *_: 'xla_gpu_pipeline' not in name)
  pipelined = {
    f'xla_gpu_enable_pipelined_{kind}': True
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
  }
  buffering = {'xla_gpu_enable_while_loop_double_buffering': True}
  assert compiler.step_options('cuda', {'data': 8, 'mdl': 1}, {}) == pipelined | buffering
  assert compiler.step_options('cuda', {'data': 1}, {'xla_gpu_a': 1}) == {'xla_gpu_a': 1}
  given = {'xla_gpu_pipeline_all_gather': 'COLLECTIVE_PIPELINING_MODE_OFF'}
  own = {k: v for k, v in pipelined.items() if 'all_gather' not in k}
  assert compiler.step_options('gpu', {'data': 8}, given) == own | buffering | given
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_enable_while_loop_double_buffering=false')
  assert compiler.step_options('gpu', {'data': 8}, {}) == pipelined


@pytest.mark.parametrize('axis', ['mdl', 'stage', 'expert'])
@pytest.mark.parametrize('is_new', [True, False])
def test_gathers_of_activations_are_not_pipelined(monkeypatch, axis, is_new):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  is_known = lambda name, *_: is_new or 'xla_gpu_pipeline' not in name
  monkeypatch.setattr(compiler, '_is_known', is_known)
  found = compiler.step_options('cuda', {'data': 4, axis: 2}, {})
  if is_new:
    assert found['xla_gpu_pipeline_all_gather'] == 'COLLECTIVE_PIPELINING_MODE_OFF'
    assert found['xla_gpu_pipeline_reduce_scatter'] == 'COLLECTIVE_PIPELINING_MODE_ON'
  else:
    assert found['xla_gpu_enable_pipelined_all_gather'] is False
    assert found['xla_gpu_enable_pipelined_all_reduce'] is True
  given = {'xla_gpu_enable_pipelined_all_gather': True}
  found = compiler.step_options('cuda', {'data': 4, axis: 2}, given)
  assert found.items() >= given.items()


@pytest.mark.parametrize(
  ('mesh', 'most'),
  [
    ({'mdl': 2}, 4), ({'stage': 2}, 4), ({'context': 2}, 4),
    ({'replica': 2}, None), ({'expert': 2}, None), ({'expert': 2, 'mdl': 2}, None),
    ({'expert': 2, 'stage': 2}, None),
  ],
)  # fmt: skip
def test_several_collectives_run_at_a_time_where_activations_are_exchanged(monkeypatch, mesh, most):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  monkeypatch.setattr(compiler, '_is_known', lambda *_: True)
  assert compiler.step_options('cuda', {'data': 4} | mesh, {}).get(OVERLAP) == most
  assert OVERLAP not in compiler.step_options('tpu', {'data': 4} | mesh, {})


def test_gradients_are_scattered_alone_without_a_loop_over_layers(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  monkeypatch.setattr(compiler, '_is_known', lambda *_: True)
  name = 'xla_gpu_reduce_scatter_combine_threshold_bytes'
  options = lambda *args: compiler.step_options(*args, scatters_each_gradient=True)
  assert options('cuda', {'data': 8}, {})[name] == 65536
  assert options('cuda', {'data': 8}, {name: 1})[name] == 1
  assert name not in options('cuda', {'data': 1}, {}) | options('tpu', {'data': 8}, {})
  assert name not in compiler.step_options('cuda', {'data': 8}, {})


def test_this_xla_knows_the_options_for_several_gpus():
  groups = compiler._SEVERAL_GPUS + compiler._EXCHANGING + compiler._EACH_GRADIENT
  known = [[name for name in names if compiler.is_known_here(*name)] for names in groups]
  assert all(known)
  assert not compiler.is_known_here('xla_gpu_nonsense', True)


def test_options_for_several_tpus_that_their_xla_knows(monkeypatch):
  monkeypatch.delenv('LIBTPU_INIT_ARGS', raising=False)
  own = dict(name for names in compiler._SEVERAL_TPUS for name in names)
  anything = lambda *_: True
  options = lambda given, mesh={'data': 8}, known=anything: compiler.step_options(
    'tpu', mesh, given, known
  )
  assert options({}) == own
  assert options({}, {'data': 1}) == options({}, known=lambda *_: False) == {}
  given = {'xla_tpu_enable_windowed_einsum_for_all_gather': True, 'xla_tpu_a': 1}
  assert options(given) == own | given
  gathering = {'xla_tpu_enable_windowed_einsum_for_all_gather': False}
  assert compiler.without_pipelining(own) == gathering
  monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_tpu_enable_windowed_einsum_for_all_gather=true')
  assert options({}) == {k: v for k, v in own.items() if k not in gathering}


def test_sparse_cores_gather_experts_where_there_are_some():
  class Device(NamedTuple):
    device_kind: str

  step = functools.partial(compiler.step_options, 'tpu', {'data': 8}, {}, lambda *_: True)
  names = step(gathers_experts=True).keys() - step().keys()
  assert len(names) == 3
  known = compiler.is_known_to(Device('TPU v5 lite'))
  assert not any(known(name, True) for name in names)
  with_some = 'TPU v5', 'TPU v5p', 'TPU v6 lite', 'TPU7x'
  assert all(devices.has_sparse_cores(Device(kind)) for kind in with_some)
  assert not any(devices.has_sparse_cores(Device(kind)) for kind in ('TPU v4', 'TPU v5e', 'cpu'))


def test_a_device_says_what_its_xla_knows():
  import jax

  known = compiler.is_known_to(jax.devices('cpu')[0])
  assert known('xla_cpu_enable_fast_math', True)
  assert not known('xla_tpu_enable_ici_ag_pipelining', True)


def test_malloc_keeps_memory_in_large_pages_where_it_can(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  setting = tmp_path / 'enabled'
  monkeypatch.setattr(cpu_memory, '_SETTING', setting)
  monkeypatch.setattr(cpu_memory, '_glibc', lambda: (2, 36))
  kept = {'trim_threshold': str(1 << 40), 'arena_max': '1'}
  all_sizes, small_ones = {'mmap_max': '0'} | kept, {'mmap_threshold': str(32 << 20)} | kept
  assert tunables() == tunables(True) == all_sizes  # a different kernel
  for kernel, large_pages, freed in (
    ('always madvise [never]', {}, all_sizes),
    ('[always] madvise never', {}, small_ones),
    ('always [madvise] never', {'hugetlb': '1'}, small_ones),
  ):
    setting.write_text(f'{kernel}\n')
    assert tunables() == all_sizes | large_pages
    assert tunables(True) == freed | large_pages
  monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.check=1')
  assert tunables() == {'check': '1', 'hugetlb': '1'} | all_sizes
  for name in ('hugetlb', 'mmap_max', 'trim_threshold', 'arena_max', 'mmap_threshold', 'top_pad'):
    monkeypatch.setenv('GLIBC_TUNABLES', f'glibc.malloc.{name}=0')
    assert cpu_memory.environment() == {}
  monkeypatch.delenv('GLIBC_TUNABLES')
  monkeypatch.setenv('MALLOC_ARENA_MAX', '2')
  assert cpu_memory.environment() == {}
  monkeypatch.delenv('MALLOC_ARENA_MAX')
  monkeypatch.setattr(cpu_memory, '_glibc', lambda: (2, 31))
  assert cpu_memory.environment() == {}
  monkeypatch.setattr(cpu_memory, '_glibc', lambda: (2, 36))
  monkeypatch.delenv('JAX_PLATFORMS')
  monkeypatch.setattr(cpu_memory, '_ACCELERATORS', (str(setting),))
  assert cpu_memory.environment() == {}


def tunables(frees_blocks: bool = False) -> dict[str, str]:
  """Returns malloc's tunables by name."""
  pairs = cpu_memory.environment(frees_blocks)['GLIBC_TUNABLES'].split(':')
  return dict(pair.removeprefix('glibc.malloc.').split('=') for pair in pairs)


_NONE = "another C library, or the environment tells malloc's part itself"


@pytest.mark.skipif(not cpu_memory.environment(), reason=_NONE)
@pytest.mark.parametrize('large_pages', [False, True])
def test_memory_that_was_freed_is_used_again_without_asking_the_kernel(
  large_pages, tmp_path, monkeypatch
):
  """The test is necessary because glibc silently ignores unknown tunables."""
  if not large_pages:
    monkeypatch.setattr(cpu_memory, '_SETTING', tmp_path / 'missing')
  elif 'mmap_max' in tunables(True):
    pytest.skip('the kernel has no large pages')
  kept, without = page_faults(30_000_000), page_faults(30_000_000, ours=False)
  assert kept < 10
  assert without > 3_000  # 30 MB in pages of 4 KiB are 7,324 faults
  assert page_faults(100_000_000) < 10
  assert page_faults(100_000_000, ours=False) > 10_000  # 24,414 in pages of 4 KiB


def page_faults(size: int, ours: bool = True) -> int:
  """Returns the page faults of an allocation in a process that has freed one of the same size."""
  code = (
    'import resource\n'
    'faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n'
    f'bytearray({size}); before = faults(); bytearray({size})\n'
    'print(faults() - before)'
  )
  env = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  env |= cpu_memory.environment() if ours else {}
  command = [sys.executable, '-c', code]
  return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


@pytest.mark.skipif(not cpu_memory.environment(), reason=_NONE)
def test_large_blocks_that_were_freed_are_not_held(monkeypatch, tmp_path):
  """A freed block that is too small for the next one would stay with the process."""
  if 'mmap_max' in tunables(True):
    pytest.skip('the kernel has no large pages')
  code = (
    'import pathlib\n'
    'for size in range(100_000_000, 1_000_000_000, 100_000_000): bytearray(size)\n'
    "print(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
  )
  env = os.environ | cpu_memory.environment(frees_blocks=True)
  process = subprocess.run([sys.executable, '-c', code], capture_output=True, check=True, env=env)
  assert int(process.stdout) * os.sysconf('SC_PAGE_SIZE') < 100_000_000


def test_children_have_the_environment_that_the_user_gave(monkeypatch):
  monkeypatch.setattr(sys, '_xoptions', {cpu_memory._MARK: True})
  for given in ('', 'glibc.malloc.check=1'):
    monkeypatch.setenv('GLIBC_TUNABLES', given)
    if not given:
      monkeypatch.delenv('GLIBC_TUNABLES')
    monkeypatch.setattr(cpu_memory, '_glibc', lambda: (2, 36))
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setenv('GLIBC_TUNABLES', cpu_memory.environment()['GLIBC_TUNABLES'])
    cpu_memory.restart_with_them()
    assert os.environ.get('GLIBC_TUNABLES', '') == given


@pytest.mark.slow
@pytest.mark.skipif(not cpu_memory.environment(), reason=_NONE)
def test_a_plain_command_is_started_again_once(tmp_path, monkeypatch):
  flags = '--noenable_checkpoint_saving', '--fdl.MAX_STEPS=1000000'
  with running(runs.command(tmp_path / 'a', *flags)) as process:
    wait_for(tmp_path / 'a' / 'metrics.jsonl')
    # glibc may write a zero byte over each colon as it reads them
    found = proc(process, 'environ').replace('\0', ':')
    assert cpu_memory.environment()['GLIBC_TUNABLES'] in found
    assert proc(process, 'cmdline').split('\0').count('paxlite_restarted') == 1
  # If glibc or a wrapper removes the variable, the process must not restart repeatedly.
  command = [sys.executable, '-X', 'paxlite_restarted', *runs.command(tmp_path / 'b', *flags)[1:]]
  with running(command) as process:
    wait_for(tmp_path / 'b' / 'metrics.jsonl')
    assert 'glibc.malloc' not in proc(process, 'environ')


@pytest.mark.parametrize(
  ('command', 'plain'),
  [
    ('python -m paxlite.main --a=1 b', '-m paxlite.main --a=1 b'),
    ('python -m paxlite --a=1 b', '-m paxlite --a=1 b'),
    ('python /venv/bin/paxlite --a=1 b', '-m paxlite --a=1 b'),
    (
      'python -u -X dev -W error -m paxlite.main --a=1 b',
      '-u -X dev -W error -m paxlite.main --a=1 b',
    ),
    ('python -m cProfile -m paxlite.main --a=1 b', None),
    ('python -m cProfile -o out -m paxlite.main --a=1 b', None),
    ('python /bin/memray run -m paxlite.main --a=1 b', None),
    ('python -m ipykernel_launcher -f x.json', None),
    ('python -', None),
    ('python run.py --a=1 b', None),
    ('python -m paxlite.main --other', None),
  ],
)
def test_which_command_is_plain(command, plain):
  wanted = None if plain is None else plain.split()
  assert cpu_memory.plain_command(command.split(), ['--a=1', 'b']) == wanted


def test_what_else_runs_main_is_not_started_again():
  """Standard input cannot be read again, and the script's earlier work would be repeated."""
  code = (
    'import runpy, sys\n'
    "sys.argv = ['main', '--help']\n"
    "try: runpy.run_module('paxlite.main', run_name='__main__')\n"
    "except SystemExit as e: print('ended', e.code, 'GLIBC_TUNABLES' in __import__('os').environ)\n"
  )
  env = {k: v for k, v in runs.environment().items() if k != 'GLIBC_TUNABLES'}
  done = subprocess.run(
    [sys.executable, '-'], input=code, capture_output=True, text=True, env=env, cwd=runs.ROOT,
    timeout=120, check=True,
  )  # fmt: skip
  assert done.stdout.splitlines()[-1] == 'ended 0 False'


@contextlib.contextmanager
def running(command):
  process = subprocess.Popen(
    command, cwd=runs.ROOT, env=runs.environment(), stdout=subprocess.DEVNULL
  )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def wait_for(path):
  until = time.monotonic() + 120
  while not path.exists():
    assert time.monotonic() < until, f'{path} is not there'
    time.sleep(0.2)


def proc(process, name) -> str:
  return pathlib.Path(f'/proc/{process.pid}/{name}').read_bytes().decode()
