"""`pip install -e .` works for any folder from which paxlite is imported."""

import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import paxlite
from tests.support import runs


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  """The files that an editable installation of a clone puts into site-packages, and the clone."""
  pytest.importorskip('setuptools.build_meta')
  folder = tmp_path_factory.mktemp('home')
  clone = folder / 'paxlite'
  for name in (
    'pyproject.toml',
    'README.md',
    'paxlite/__init__.py',
    'paxlite/data/packaged/__init__.py',
  ):
    (clone / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(runs.ROOT / name, clone / name)
  build = 'import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])'
  wheels = folder / 'wheels'
  wheels.mkdir()
  subprocess.run(
    [sys.executable, '-c', build, str(wheels)], cwd=clone, check=True, capture_output=True
  )
  with zipfile.ZipFile(next(wheels.glob('*.whl'))) as wheel:
    wheel.extractall(folder / 'site')
  return folder / 'site', clone


@pytest.mark.parametrize('where', ['above the clone', 'in the clone', 'elsewhere'])
def test_folders_that_are_called_like_a_package_are_in_nobodys_way(site, tmp_path, where):
  packages, clone = site
  folder = {'above the clone': clone.parent, 'in the clone': clone, 'elsewhere': tmp_path}[where]
  (folder / 'data' / 'mine').mkdir(parents=True, exist_ok=True)
  (clone / 'data' / 'mine').mkdir(parents=True, exist_ok=True)
  # -S ignores the packages of this environment, which may contain paxlite too.
  code = (
    f'import site; site.addsitedir({str(packages)!r}); import paxlite, paxlite.data.packaged; '
    'print(paxlite.__version__, paxlite.data.packaged.VOCAB)'
  )
  out = subprocess.run(
    [sys.executable, '-S', '-c', code],
    cwd=folder,
    env={'PATH': ''},
    capture_output=True,
    text=True,
    check=False,
  )
  assert out.returncode == 0, out.stderr
  vocab = clone / 'paxlite' / 'data' / 'packaged' / 'text8k.model'
  assert out.stdout.split() == [paxlite.__version__, str(vocab)]


def test_the_extras_of_accelerators():
  text = pathlib.Path(runs.ROOT / 'pyproject.toml').read_text()
  extras = tomllib.loads(text)['project']['optional-dependencies']
  assert extras['cuda12'] == extras['cuda'] == ['jax[cuda12]']
  assert extras['cuda13'] == ['jax[cuda13]']
  assert extras['tpu'] == ['jax[tpu]']
