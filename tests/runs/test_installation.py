"""`pip install -e .` works for any folder from which paxlite is imported."""

import json
import pathlib
import re
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
    [sys.executable, '-S', '-c', code], cwd=folder, env={'PATH': ''}, capture_output=True,
    text=True, check=False,
  )  # fmt: skip
  assert out.returncode == 0, out.stderr
  vocab = clone / 'paxlite' / 'data' / 'packaged' / 'text8k.model'
  assert out.stdout.split() == [paxlite.__version__, str(vocab)]


def test_the_extras_of_accelerators():
  text = pathlib.Path(runs.ROOT / 'pyproject.toml').read_text()
  extras = tomllib.loads(text)['project']['optional-dependencies']
  assert extras['cuda12'] == extras['cuda'] == ['jax[cuda12]']
  assert extras['cuda13'] == ['jax[cuda13]']
  assert extras['tpu'] == ['jax[tpu]']


def cloned(folder: pathlib.Path) -> pathlib.Path:
  """Puts the tracked files into an empty folder, and returns it."""
  folder.mkdir()
  tracked = ('git', 'archive', 'HEAD')
  archive = subprocess.run(tracked, cwd=runs.ROOT, capture_output=True, check=True).stdout
  subprocess.run(['tar', '-x', '-C', str(folder)], input=archive, check=True)
  return folder


def built(kind: str, source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Builds a wheel or an sdist of a source, without a network, and returns its path."""
  code = f'import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])'
  folder.mkdir()
  subprocess.run(
    [sys.executable, '-c', code, str(folder)], cwd=source, check=True, capture_output=True
  )
  (path,) = folder.iterdir()
  return path


def environment(folder: pathlib.Path, *options: str) -> pathlib.Path:
  """Makes an environment that finds the packages of this one after its own; returns bin/."""
  subprocess.run([sys.executable, '-m', 'venv', *options, str(folder)], check=True)
  site = next((folder / 'lib').glob('python*/site-packages'))
  packages = pathlib.Path(pytest.__file__).parents[1]
  (site / 'zz_packages.pth').write_text(f'{packages}\n')
  return folder / 'bin'


@pytest.mark.slow
def test_a_wheel_holds_all_it_needs_and_nothing_else(tmp_path):
  """The wheel, built from the sdist, is installed into an environment of its own."""
  pytest.importorskip('setuptools.build_meta')
  clone = cloned(tmp_path / 'clone')
  sdist = built('sdist', clone, tmp_path / 'sdist')
  subprocess.run(['tar', '-xzf', str(sdist), '-C', str(tmp_path)], check=True)
  wheel = built('wheel', tmp_path / sdist.name.removesuffix('.tar.gz'), tmp_path / 'wheel')
  checked = subprocess.run(
    [sys.executable, '-m', 'twine', 'check', '--strict', str(sdist), str(wheel)],
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert checked.returncode == 0, checked.stdout + checked.stderr
  assert checked.stdout.count('PASSED') == 2
  with zipfile.ZipFile(wheel) as file:
    names = {n for n in file.namelist() if '.dist-info/' not in n}
  package = clone / 'paxlite'
  wanted = {str(p.relative_to(clone)) for p in package.rglob('*') if p.is_file()}
  assert names == {n for n in wanted if '__pycache__' not in n and '.egg-info' not in n}
  held = subprocess.run(['tar', '-tzf', str(sdist)], capture_output=True, text=True, check=True)
  inside = {n.partition('/')[2] for n in held.stdout.split()}
  scripts = {f'scripts/{p.name}' for p in (clone / 'scripts').iterdir()}
  made = {'MANIFEST.in', 'PKG-INFO', 'setup.cfg'}
  inside = {n for n in inside if n and not n.endswith('/') and '.egg-info' not in n}
  texts = {'CHANGELOG.md', 'LICENSE', 'README.md', 'pyproject.toml'}
  assert inside == names | scripts | made | texts

  programs = environment(tmp_path / 'venv', '--without-pip')  # it finds that of this environment
  subprocess.run(
    [programs / 'python', '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', wheel],
    check=True,
  )
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  (elsewhere / 'mine.py').write_text(
    'from paxlite.experiments.demo import TinyGPT\n\n\nclass Mine(TinyGPT):\n  MAX_STEPS = 2\n'
  )
  demo = 'train', 'DemoGPT', '--folder=demo', 'NUM_LAYERS=1', 'MODEL_DIMS=32', 'MAX_STEPS=2'
  for arguments, said in (
    (['--version'], f'paxlite {paxlite.__version__}'),
    (['list', 'tiny'], 'TinyGPT'),
    (['train', 'mine.Mine', '--folder=run'], 'step 2/2'),
    ([*demo, 'MAX_EVAL_BATCHES=1'], 'step 2/2'),
  ):
    assert said in output(programs / 'paxlite', arguments, elsewhere)


def output(program: pathlib.Path, arguments: list[str], folder: pathlib.Path) -> str:
  """Returns what an installed program prints in a folder."""
  without_clone = {k: v for k, v in runs.environment().items() if k != 'PYTHONPATH'}
  done = subprocess.run(
    [program, *arguments], cwd=folder, env=without_clone, capture_output=True, text=True,
    check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout


IMAGES = 'cuda', 'tpu'


def instructions(path: pathlib.Path) -> list[tuple[str, str]]:
  lines = [line for line in path.read_text().splitlines() if line and not line.startswith('#')]
  assert not any(line.endswith('\\') for line in lines), 'an instruction is a line'
  return [(word, rest) for word, _, rest in (line.partition(' ') for line in lines)]


def test_the_extras_of_images_are_known():
  """What they install is all in which their instructions differ."""
  text = pathlib.Path(runs.ROOT / 'pyproject.toml').read_text()
  known = tomllib.loads(text)['project']['optional-dependencies']
  found = []
  for name in IMAGES:
    lines = instructions(runs.ROOT / 'docker' / f'{name}.Dockerfile')
    named = re.findall(r'\[([a-z].*)\]', '\n'.join(rest for word, rest in lines if word == 'RUN'))
    assert named
    assert all(extra in known for extras in named for extra in extras.split(','))
    found.append([(word, re.sub(r'\[[a-z].*\]', '', rest)) for word, rest in lines])
  assert found[0] == found[1]


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', IMAGES)
def test_the_steps_of_an_image(name, tmp_path):
  """Does what a Dockerfile says, but for the packages that paxlite needs; those are here."""
  clone, root = cloned(tmp_path / 'clone'), tmp_path / 'root'
  file = clone / 'docker' / f'{name}.Dockerfile'
  programs = environment(tmp_path / 'venv')
  path = {'PATH': f'{programs}:/usr/bin:/bin'}
  extras = tomllib.loads((clone / 'pyproject.toml').read_text())['project']
  folder, commands = root, {}
  for word, rest in instructions(file):
    if word == 'FROM':
      version = re.fullmatch(r'python:(3\.\d+)-slim', rest)[1]
      assert f'Programming Language :: Python :: {version}' in extras['classifiers']
    elif word == 'WORKDIR':
      folder = root / rest.lstrip('/')
      folder.mkdir(parents=True, exist_ok=True)
    elif word == 'COPY':
      *sources, target = rest.split()
      for source in sources:
        if (clone / source).is_dir():
          shutil.copytree(clone / source, folder / target, dirs_exist_ok=True)
        else:
          to = folder / target / (source if target.endswith('/') else '')
          to.parent.mkdir(parents=True, exist_ok=True)
          shutil.copy(clone / source, to)
    elif word == 'RUN':
      here = rest.replace('pip install', 'pip install --no-index --no-deps --no-build-isolation')
      subprocess.run(['sh', '-euc', here], cwd=folder, env=path, check=True, capture_output=True)
    else:
      commands[word] = json.loads(rest)
  assert commands.keys() == {'ENTRYPOINT', 'CMD'}
  (entry,) = commands['ENTRYPOINT']
  assert 'paxlite train' in output(programs / entry, commands['CMD'], folder)
  asked = re.search(rf'^#   docker run .* paxlite:{name} (.*)$', file.read_text(), re.MULTILINE)
  shown = output(programs / entry, [*asked[1].split(), '--dry_run'], folder)
  assert 'parameters' in shown
  slurm = (runs.ROOT / 'scripts' / 'slurm_job.sh').read_text()
  assert '/opt/paxlite' in slurm
  assert (root / 'opt' / 'paxlite' / 'scripts' / 'slurm_job.sh').is_file()
