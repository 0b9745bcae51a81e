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
    'paxlite/core/__init__.py',
    'paxlite/core/former_modules.py',
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


@pytest.mark.slow
def test_a_wheel_holds_all_it_needs_and_nothing_else(tmp_path):
  """The wheel is installed into an environment of its own, beside the packages that it needs."""
  pytest.importorskip('setuptools.build_meta')
  clone = tmp_path / 'clone'
  clone.mkdir()
  tracked = ('git', 'archive', 'HEAD')
  archive = subprocess.run(tracked, cwd=runs.ROOT, capture_output=True, check=True).stdout
  subprocess.run(['tar', '-x', '-C', str(clone)], input=archive, check=True)
  for kind in ('wheel', 'sdist'):
    code = f'import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])'
    subprocess.run(
      [sys.executable, '-c', code, str(tmp_path)], cwd=clone, check=True, capture_output=True
    )
  (wheel,) = tmp_path.glob('*.whl')
  with zipfile.ZipFile(wheel) as file:
    names = {n for n in file.namelist() if '.dist-info/' not in n}
  package = clone / 'paxlite'
  wanted = {str(p.relative_to(clone)) for p in package.rglob('*') if p.is_file()}
  assert names == {n for n in wanted if '__pycache__' not in n and '.egg-info' not in n}
  (sdist,) = tmp_path.glob('*.tar.gz')
  held = subprocess.run(['tar', '-tzf', str(sdist)], capture_output=True, text=True, check=True)
  inside = {n.partition('/')[2] for n in held.stdout.split()}
  scripts = {f'scripts/{p.name}' for p in (clone / 'scripts').iterdir()}
  made = {'MANIFEST.in', 'PKG-INFO', 'setup.cfg'}
  inside = {n for n in inside if n and not n.endswith('/') and '.egg-info' not in n}
  texts = {'CHANGELOG.md', 'LICENSE', 'README.md', 'pyproject.toml'}
  assert inside == names | scripts | made | texts

  subprocess.run([sys.executable, '-m', 'venv', str(tmp_path / 'venv')], check=True)
  python = tmp_path / 'venv' / 'bin' / 'python'
  subprocess.run(
    [python, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', wheel], check=True
  )
  site = next((tmp_path / 'venv' / 'lib').glob('python*/site-packages'))
  packages = pathlib.Path(pytest.__file__).parents[1]
  (site / 'zz_packages.pth').write_text(f'{packages}\n')
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  (elsewhere / 'mine.py').write_text(
    'from paxlite.experiments.demo import TinyGPT\n\n\nclass Mine(TinyGPT):\n  MAX_STEPS = 2\n'
  )
  environment = {k: v for k, v in runs.environment().items() if k != 'PYTHONPATH'}
  for arguments, said in (
    (['--version'], f'paxlite {paxlite.__version__}'),
    (['list', 'tiny'], 'TinyGPT'),
    (['train', 'mine.Mine', '--folder=run'], 'step 2/2'),
    (['train', 'mine.Mine', '--folder=run'], 'Training is complete'),
  ):
    done = subprocess.run(
      [tmp_path / 'venv' / 'bin' / 'paxlite', *arguments],
      cwd=elsewhere, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
