"""What `paxlite doctor` finds, and what it says of known conflicts."""

import dataclasses

import pytest

import paxlite
from paxlite.doctor import command as doctor
from paxlite.doctor import kernel_check

GPU = dict(has_gpu=True, platform='gpu', devices='1 × NVIDIA H100 (gpu)', driver='580.65.06')


@pytest.fixture(scope='module')
def healthy():
  """This machine, with enough memory and disk and without accelerators."""
  found = doctor.examine()
  packages = {k: v for k, v in found.packages.items() if 'cuda' not in k and k != 'libtpu'}
  calm = dict(has_gpu=False, has_tpu=False, driver='', memory=8 << 30, disk=99 << 30)
  return dataclasses.replace(
    found, packages={**packages, 'jax': '0.10.2', 'jaxlib': '0.10.2'}, variables={}, **calm
  )


def test_what_is_here(healthy):
  lines = dict(line.split(maxsplit=1) for line in str(healthy).splitlines() if line[:6] != 'extra ')
  assert lines['paxlite'].startswith(paxlite.__version__)
  assert lines['devices'].endswith('× cpu')
  assert lines['CUDA'] == "none of JAX's packages for it"
  assert 'extra weights' in str(healthy)
  assert list(healthy.problems()) == []


@pytest.mark.parametrize(
  ('plugins', 'values', 'said'),
  [
    ({}, dict(memory=1 << 30), 'only 1.0 GiB of memory are free'),
    ({}, dict(disk=1 << 30), 'only 1.0 GiB of disk are free'),
    ({}, dict(devices='', failure='no tpu'), 'JAX has no devices: no tpu. Leave JAX_PLATFORMS'),
    ({'jaxlib': '0.9.1'}, {}, 'jax and jaxlib have different versions'),
    ({}, dict(has_tpu=True), "JAX does not use this machine's TPU: pip install "),
    ({}, GPU | dict(platform='cpu'), "JAX's package for it is missing: pip install "),
    ({12: '0.10.2'}, GPU | dict(driver='510.1'), 'the driver 510.1 is older than 525'),
    ({12: '0.9.0'}, GPU, 'jax-cuda12-plugin 0.9.0 is of another version than jax'),
    ({13: '0.10.2'}, GPU | dict(driver='550.1'), 'the driver 550.1 is too old for CUDA 13'),
    ({12: '0.10.2', 13: '0.10.2'}, GPU, 'pip uninstall jax-cuda12-plugin'),
  ],
)  # fmt: skip
def test_a_problem_and_the_way_out(healthy, plugins, values, said):
  names = {f'jax-cuda{k}-plugin' if isinstance(k, int) else k: v for k, v in plugins.items()}
  machine = dataclasses.replace(healthy, packages=healthy.packages | names, **values)
  (problem,) = machine.problems()
  assert said in problem
  assert all(
    f'{name} {version}' in str(machine) for name, version in names.items() if 'cuda' in name
  )


def test_wrong_kernels_are_problems(monkeypatch, capsys):
  found = [
    kernel_check.KernelComparison('cuDNN, a sink', 0.004, 'USE_FLASH_ATTENTION=False'),
    kernel_check.KernelComparison('cuDNN, a bias', float('nan'), 'USE_FLASH_ATTENTION=False'),
  ]
  monkeypatch.setattr(kernel_check, 'comparisons', lambda: iter(found))
  with pytest.raises(SystemExit) as end:
    doctor.main(['--kernels'])
  assert end.value.code == 1
  out = capsys.readouterr().out
  assert 'cuDNN, a sink: 0.004 of the largest entry' in out
  assert 'Problem: cuDNN, a sink' not in out
  assert 'Problem: cuDNN, a bias: results or gradients differ' in out
  assert 'Do without: USE_FLASH_ATTENTION=False' in out


@pytest.mark.slow
def test_the_kernels_of_this_machine_are_right():
  assert not [c for c in kernel_check.comparisons() if c.is_wrong]
