"""Checks what must be impossible, for each row of the table in docs/reliability.md."""

import ast
import functools
import hashlib
import http.server
import os
import pathlib
import pickletools
import re
import subprocess
import sys
import threading
import time

import pytest

from paxlite.contrib.gpu.scripts_gpu import download_lambada, download_the_pile, tfds_datasets
from paxlite.core.errors import UserError
from paxlite.experiments import registry
from paxlite.tokenization.flat_tokens_writer import FlatTokensWriter
from paxlite.tracking.summaries import Summaries
from tests.rules.test_structure import FILES, PACKAGE
from tests.support import runs
from tests.support.processes import start_processes

SECRET = 'hunter2-of-the-environment'


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
  """Returns the calls, their named arguments and the imports of each module, with its name."""
  kinds = (ast.Call, ast.keyword, ast.Import, ast.ImportFrom)
  return [
    (path.relative_to(PACKAGE).as_posix(), node)
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, kinds)
  ]


def calls(*names: str) -> set[str]:
  """Returns the modules that call something with one of these names."""
  return {
    path
    for path, node in nodes()
    if isinstance(node, ast.Call)
    and {getattr(node.func, 'attr', None), getattr(node.func, 'id', None)} & {*names}
  }


def importers(*modules: str) -> set[str]:
  return {
    path
    for path, node in nodes()
    for name in (
      [alias.name for alias in node.names]
      if isinstance(node, ast.Import)
      else [node.module or '']
      if isinstance(node, ast.ImportFrom)
      else []
    )
    if name.split('.')[0] in modules
  }


def test_what_could_run_code_is_in_one_place_or_none():
  assert importers('pickle') == {'compilation/compiled_step.py'}
  assert importers('dill', 'cloudpickle', 'marshal', 'shelve', 'yaml') == set()
  # Python with a module of paxlite, and nothing else
  starters = {
    'ladder/trainings.py',
    'recipes/processes.py',
    'finetuning/reinforcement/user_processes.py',
  }
  assert importers('subprocess') == starters
  for path in starters:
    text = (runs.ROOT / 'paxlite' / path).read_text()
    assert text.count('subprocess.Popen(') == 1
    assert re.search(r"\[\s*sys\.executable,\s+'-P',\s+'-m',\s+'paxlite[.']", text)
  assert importers('tarfile', 'zipfile') | calls('unpack_archive') == set()
  assert calls('eval', 'exec', 'system', 'popen') == set()


def test_connections_between_processes_carry_no_pickles():
  """multiprocessing's Connection.recv() would load one; recv_bytes() gives the bytes."""
  assert 'processes/peers.py' in importers('multiprocessing')
  assert calls('recv', 'Client', 'Listener', 'Pipe') & importers('multiprocessing') == set()


def test_torch_and_numpy_load_data_alone():
  loads = [n for _, n in nodes() if isinstance(n, ast.Call) and ast.unparse(n.func) == 'torch.load']
  (only,) = ({k.arg: ast.unparse(k.value) for k in n.keywords} for n in loads)
  assert only['weights_only'] == 'True'
  allowed = [n for _, n in nodes() if isinstance(n, ast.keyword) and n.arg == 'allow_pickle']
  assert all(ast.unparse(n.value) == 'False' for n in allowed)


@pytest.mark.slow
def test_nothing_that_a_run_writes_is_a_pickle(tmp_path):
  """The files also hold no variables of the environment, except those that configure the run."""
  result = runs.run(
    tmp_path, '--fdl.MAX_STEPS=5', '--fdl.PROFILER_CAPTURE_STEP=2', '--fdl.STACK_TRACE_INTERVAL=1',
    config='tests.support.experiments.TinyText', env={'A_TOKEN': SECRET, 'XLA_UNUSED': SECRET},
  )  # fmt: skip
  files = [p for p in tmp_path.rglob('*') if p.is_file()]
  assert len(files) > 50
  assert SECRET not in result.stdout + result.stderr
  for path in files:
    data = path.read_bytes()
    assert SECRET.encode() not in data, path
    # A pickle of protocol 2 or above begins with these bytes.
    if data[:1] == b'\x80' and data[1:2] in b'\x02\x03\x04\x05':
      with pytest.raises(ValueError):  # noqa: PT011 - any ValueError
        list(pickletools.genops(data))


@pytest.mark.parametrize(
  'name', ['subprocess.getoutput', 'os.system', 'builtins.eval', 'experiment_that_runs.Code']
)
def test_what_a_file_names_is_not_imported(tmp_path, monkeypatch, name):
  """A checkpoint's experiment.json may name any module, but a module beside it is not run."""
  (tmp_path / 'experiment_that_runs.py').write_text('raise SystemExit("code of a checkpoint ran")')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(
    UserError, match=r'is not an Experiment class|paxlite does not import modules for checkpoints'
  ):
    registry.find_known(name)
  assert registry.find_known('paxlite.experiments.demo.TinyGPT').__name__ == 'TinyGPT'


@pytest.mark.slow
def test_the_tools_import_what_the_user_names(tmp_path):
  runs.run(tmp_path / 'run', '--fdl.MAX_STEPS=2', config='tests.support.experiments.TinyText')
  tool = 'paxlite', 'generate'
  arguments = [f'--checkpoint={tmp_path / "run"}', '--prompt=In the', '--max_new_tokens=3']
  refused = runs.module(*tool, *arguments, code=2)
  assert 'if it is yours, --import=tests.support.experiments' in refused.stderr
  runs.module(*tool, *arguments, '--import=tests.support.experiments')
  wrong = runs.module(*tool, *arguments, '--import=no.such', code=2)
  assert wrong.stderr == "error: --import=no.such: No module named 'no'\n"


@pytest.mark.parametrize('name', ['../up', 'a/b', '', '..', 'with space', 'nul\0'])
def test_names_stay_inside_of_their_folder(tmp_path, name):
  with pytest.raises(UserError, match='cannot be the name of a split'):
    FlatTokensWriter(tmp_path / 'out', name, 8192, 2)
  assert not (tmp_path / 'out').exists()


def test_names_of_evaluations_stay_inside_too(tmp_path):
  summaries = Summaries(tmp_path / 'run', 1)
  (tmp_path / 'run').mkdir()
  summaries.result(1, '../../up', {'x': 1.0}, '')
  summaries.close()
  assert [p.name for p in tmp_path.iterdir()] == ['run']
  assert [p.name for p in (tmp_path / 'run' / 'summaries').iterdir()] == ['eval_.._.._up']


class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200)
    self.end_headers()
    self.wfile.write(b'what came over the line')

  def log_message(self, *args):
    pass


def test_a_download_is_there_when_its_checksum_is_right(tmp_path):
  with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/set.jsonl'
    with pytest.raises(UserError, match='its SHA-256 is'):
      tfds_datasets.fetched(url, '0' * 64, tmp_path / 'bad')
    assert list((tmp_path / 'bad').iterdir()) == [], 'nothing is left'
    right = hashlib.sha256(b'what came over the line').hexdigest()
    path = tfds_datasets.fetched(url, right, tmp_path / 'good')
    server.shutdown()
  assert pathlib.Path(path).read_bytes() == b'what came over the line'
  assert [p.name for p in (tmp_path / 'good').iterdir()] == ['set.jsonl']


def test_downloads_are_encrypted():
  for module in (download_lambada, download_the_pile, tfds_datasets):
    source = pathlib.Path(module.__file__).read_text()
    assert 'http://' not in source


def listening(pid: int) -> set[str]:
  """Returns the addresses on which a process listens, in /proc's hexadecimal form."""
  inodes = set()
  for fd in pathlib.Path(f'/proc/{pid}/fd').iterdir():
    try:
      inodes.add(os.readlink(fd).removeprefix('socket:[').rstrip(']'))
    except OSError:
      continue
  found = set()
  for table in ('tcp', 'tcp6'):
    for line in pathlib.Path(f'/proc/{pid}/net/{table}').read_text().splitlines()[1:]:
      columns = line.split()
      if columns[3] == '0A' and columns[9] in inodes:
        found.add(columns[1].partition(':')[0])
  return found


@pytest.mark.slow
def test_processes_listen_on_their_own_address_alone(tmp_path):
  """Only the coordinator and gloo listen; no profiler does. Foreign connections change nothing."""
  flags = '--fdl.MAX_STEPS=1000000', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000000'
  processes = start_processes(tmp_path, 2, *flags, config='TinyGPT')
  try:
    end = time.monotonic() + 90
    while not (tmp_path / 'metrics.jsonl').exists() and time.monotonic() < end:
      time.sleep(0.1)
    addresses = [listening(p.pid) for p in processes]
  finally:
    for process in processes:
      process.kill()
      process.communicate()
  loopback = {'0100007F', '0000000000000000FFFF00000100007F', '00000000000000000000000001000000'}
  assert addresses[0], 'process 0 listens'
  assert set().union(*addresses) <= loopback, addresses


@pytest.mark.slow
def test_a_process_alone_listens_on_nothing(tmp_path):
  code = 'import os; from tests.rules.test_security import listening; print(listening(os.getpid()))'
  script = tmp_path / 'listens.py'
  script.write_text(
    'import sys, paxlite.programs.training as p\n'
    'train = p.train\n'
    f'p.train = lambda run: (train(run), exec({code!r}))\n'
    'from paxlite import main\n'
    'sys.exit(main.main(["x", "--fdl_config=TinyGPT", "--fdl.MAX_STEPS=2",\n'
    f'  "--job_log_dir={tmp_path}/run"]))\n'
  )
  out = subprocess.run(
    [sys.executable, str(script)], cwd=runs.ROOT, text=True, capture_output=True, check=True,
    env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)},
  ).stdout  # fmt: skip
  assert out.splitlines()[-1] == 'set()'
