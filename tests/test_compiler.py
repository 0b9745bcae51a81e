"""Compiled programs are kept from run to run, in a folder that is the user's alone."""

import os
import pathlib
import subprocess
import time

import pytest

from paxlite import compiler, huge_pages
from tests import runs

TINY = ['--fdl.MAX_STEPS=2', '--noenable_checkpoint_saving']


@pytest.fixture
def home(tmp_path, monkeypatch):
  """A user without a cache of programs; returns where paxlite's goes."""
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return compiler.programs_folder()


def test_the_next_run_compiles_nothing(home, tmp_path, monkeypatch):
  assert str(home).startswith(str(tmp_path))
  runs.run(tmp_path / 'a', *TINY)
  kept = {p.name for p in home.iterdir()}
  assert any('step' in name for name in kept)
  assert home.stat().st_mode & 0o777 == 0o700
  first = runs.losses(tmp_path / 'a')
  runs.run(tmp_path / 'b', *TINY)
  assert {p.name for p in home.iterdir()} == kept
  assert runs.losses(tmp_path / 'b') == first
  monkeypatch.setenv('JAX_ENABLE_COMPILATION_CACHE', 'false')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'none'))
  runs.run(tmp_path / 'c', *TINY)
  assert not list(compiler.programs_folder().glob('*step*'))


def test_a_folder_that_others_can_write_to_is_not_used(home, caplog):
  home.mkdir(parents=True)
  home.chmod(0o777)
  compiler.keep_programs()
  assert 'others than the user can write to' in caplog.text
  assert 'JAX_COMPILATION_CACHE_DIR' not in os.environ


def test_a_home_that_cannot_be_written_to_is_told(tmp_path, monkeypatch, caplog):
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  compiler.keep_programs()
  assert 'Compiled programs are not kept' in caplog.text
  assert 'JAX_COMPILATION_CACHE_DIR' not in os.environ


def test_the_users_own_folder_is_left_alone(home, monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '/elsewhere')
  compiler.keep_programs()
  assert os.environ['JAX_COMPILATION_CACHE_DIR'] == '/elsewhere'
  assert not home.exists()


def test_old_programs_go(home, monkeypatch):
  home.mkdir(parents=True, mode=0o700)
  old, new = home / 'old', home / 'new'
  old.touch()
  new.touch()
  month = time.time() - 31 * 86400
  os.utime(old, (month, month))
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'x')  # restored at the end
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  compiler.keep_programs()
  assert [p.name for p in home.iterdir()] == ['new']


def test_flags_of_the_environment_come_first(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  assert compiler.initial_values_options('cpu') == {'xla_backend_optimization_level': 1}
  assert compiler.initial_values_options('cuda') == {}
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=3')
  assert compiler.initial_values_options('cpu') == {}


def test_large_pages_are_asked_for_where_the_kernel_lets_a_program_choose(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  setting = tmp_path / 'enabled'
  monkeypatch.setattr(huge_pages, '_SETTING', setting)
  assert huge_pages.environment() == {}  # another system
  setting.write_text('always [madvise] never\n')
  monkeypatch.setattr(huge_pages, '_glibc', lambda: (2, 36))
  assert huge_pages.environment() == {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
  monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.check=1')
  both = 'glibc.malloc.check=1:glibc.malloc.hugetlb=1'
  assert huge_pages.environment() == {'GLIBC_TUNABLES': both}
  monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=0')
  assert huge_pages.environment() == {}
  monkeypatch.delenv('GLIBC_TUNABLES')
  monkeypatch.setattr(huge_pages, '_glibc', lambda: (2, 31))
  assert huge_pages.environment() == {}
  monkeypatch.setattr(huge_pages, '_glibc', lambda: (2, 36))
  setting.write_text('[always] madvise never\n')
  assert huge_pages.environment() == {}
  setting.write_text('always [madvise] never\n')
  monkeypatch.delenv('JAX_PLATFORMS')
  monkeypatch.setattr(huge_pages, '_ACCELERATORS', (str(setting),))
  assert huge_pages.environment() == {}


@pytest.mark.skipif(not huge_pages.environment(), reason='the kernel does not leave the choice')
def test_a_run_has_large_pages(tmp_path):
  """Counts what the process had mapped in them, while it still runs."""
  process = subprocess.Popen(
    runs.command(tmp_path, '--noenable_checkpoint_saving', '--fdl.MAX_STEPS=1000000'),
    cwd=runs.ROOT,
    env=runs.environment(),
    stdout=subprocess.DEVNULL,
  )
  try:
    until = time.monotonic() + 120
    while not (tmp_path / 'metrics.jsonl').exists() and time.monotonic() < until:
      time.sleep(0.5)
    environ = pathlib.Path(f'/proc/{process.pid}/environ').read_bytes().decode().split('\0')
    assert 'GLIBC_TUNABLES=glibc.malloc.hugetlb=1' in environ
    lines = pathlib.Path(f'/proc/{process.pid}/smaps_rollup').read_text().splitlines()
    (line,) = [x for x in lines if x.startswith('AnonHugePages')]
    assert int(line.split()[1]) > 2048
  finally:
    process.kill()
    process.wait()
