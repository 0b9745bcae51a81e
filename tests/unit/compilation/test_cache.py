"""Compiled programs are kept between runs, undamaged, in a folder that only the user can access."""

import os
import pathlib
import random
import re
import time

import jax
import pytest
from jax._src import compilation_cache

from paxlite.compilation import cache
from paxlite.compilation.cache import CompilationCache
from tests.support import runs
from tests.support.processes import on_processes

TINY = ['--fdl.MAX_STEPS=2', '--noenable_checkpoint_saving']


@pytest.fixture
def home(tmp_path, monkeypatch):
  """A user without a program cache; returns the folder where paxlite's cache goes."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_enable_compilation_cache',
  )
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update('jax_enable_compilation_cache', True)  # a test of paxlite compile turns it off
  monkeypatch.setattr(compilation_cache, 'get_file_cache', compilation_cache.get_file_cache)
  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  monkeypatch.delenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  yield cache.programs_folder()
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_next_run_reads_what_the_last_has_compiled_unless_it_is_damaged(
  home, tmp_path, monkeypatch
):
  log = {
    'JAX_DEBUG_LOG_MODULES': 'jax._src.compiler,jax._src.compilation_cache',
    'JAX_RAISE_PERSISTENT_CACHE_ERRORS': 'true',
  }
  hit = r"Persistent compilation cache hit for 'jit_step'"
  first = runs.run(tmp_path / 'a', *TINY, env=log)
  assert not re.search(hit, first.stderr)
  assert any('step' in p.name for p in home.iterdir())
  assert home.stat().st_mode & 0o777 == 0o700
  second = runs.run(tmp_path / 'b', *TINY, env=log)
  assert re.search(hit, second.stderr)
  assert runs.losses(tmp_path / 'b') == runs.losses(tmp_path / 'a')
  without = runs.run(tmp_path / 'c', *TINY, env=log | {'JAX_ENABLE_COMPILATION_CACHE': 'false'})
  assert not re.search(hit, without.stderr)

  (program,) = (p for p in home.iterdir() if 'jit_step' in p.name)
  # this bit is one of those that crashed a run or changed its losses
  flip(program, 8 * (program.stat().st_size // 2) + 3)
  damaged = runs.run(tmp_path / 'd', *TINY)
  assert damaged.stderr.count('is damaged: removing it and compiling again') == 1
  assert program.is_file()
  assert runs.losses(tmp_path / 'd') == runs.losses(tmp_path / 'a')
  assert 'is damaged' not in runs.run(tmp_path / 'e', *TINY).stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_of_several_processes_keeps_nothing(home, tmp_path):
  on_processes(tmp_path / 'a', 2, '--fdl.MAX_STEPS=2', config='TinyGPT')
  assert not home.exists()


@pytest.mark.slow
def test_one_process_of_one_is_alone(home, tmp_path):
  alone = '--num_hosts=1', '--host_idx=0', '--server_addr=127.0.0.1:1'
  runs.run(tmp_path / 'a', *TINY, *alone)
  assert home.exists()


@pytest.mark.parametrize('part', ['', '..'])
def test_a_folder_that_others_can_change_is_not_used(home, caplog, part):
  home.mkdir(parents=True)
  (home / part).chmod(0o777)
  cache.enable()
  assert 'other users can write to' in caplog.text
  assert jax.config.jax_compilation_cache_dir is None


def test_a_home_that_cannot_be_written_to_is_told(home, tmp_path, monkeypatch, caplog):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  cache.enable()
  assert 'Compiled programs are not cached:' in caplog.text
  assert jax.config.jax_compilation_cache_dir is None


def test_the_users_own_folder_is_left_alone(home):
  jax.config.update('jax_compilation_cache_dir', '/elsewhere')
  cache.enable()
  assert jax.config.jax_compilation_cache_dir == '/elsewhere'
  assert not home.exists()


def test_old_programs_go(home):
  home.mkdir(parents=True, mode=0o700)
  old, new = home / 'old', home / 'new'
  old.touch()
  new.touch()
  month = time.time() - 31 * 86400
  os.utime(old, (month, month))
  cache.enable()
  assert [p.name for p in home.iterdir()] == ['new']
  assert jax.config.jax_compilation_cache_dir == str(home)


def flip(path: pathlib.Path, bit: int) -> None:
  content = bytearray(path.read_bytes())
  content[bit // 8] ^= 1 << bit % 8
  path.write_bytes(content)


def test_every_flipped_bit_is_noticed(tmp_path, caplog):
  kept = CompilationCache(tmp_path)
  program = random.Random(0).randbytes(5000)
  path = tmp_path / 'key-program'
  kept.put('key', program)
  assert kept.get('key') == program
  bits = 8 * path.stat().st_size
  for bit in [*random.Random(1).sample(range(bits), 300), 0, bits - 1]:
    kept.put('key', program)
    flip(path, bit)
    assert kept.get('key') is None, bit
    assert not path.exists()
  for content in (b'', program, program[:100], bytes(5000)):
    path.write_bytes(content)
    assert kept.get('key') is None
  assert kept.get('key') is None  # a missing program causes no message
  assert caplog.text.count('is damaged') == 306


def test_two_programs_change_places(tmp_path):
  kept = CompilationCache(tmp_path)
  kept.put('a', b'one')
  kept.put('b', b'two')
  (tmp_path / 'a-program').rename(tmp_path / 'c')
  (tmp_path / 'b-program').rename(tmp_path / 'a-program')
  assert kept.get('a') is None


def test_a_full_disk_keeps_nothing(tmp_path, monkeypatch, caplog):
  kept = CompilationCache(tmp_path / 'gone')
  kept.put('key', b'program')
  assert 'is not cached' in caplog.text
  assert kept.get('key') is None


def test_another_jax_keeps_nothing(home, monkeypatch, caplog):
  monkeypatch.delattr(compilation_cache, 'get_file_cache')
  cache.enable()
  assert 'reads them differently' in caplog.text
  assert jax.config.jax_compilation_cache_dir is None
