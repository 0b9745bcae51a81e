"""Imports go downward only, and following one batch stays short."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'paxlite'

# From the bottom up. A module imports its own group and those before it.
GROUPS = [
  {
    'damaged',
    'devices',
    'errors',
    'host_memory',
    'ownership',
    'partitioning',
    'paths',
    'run_files',
    'shell',
    'templates',
    'terminal',
    'data',
    'backends',
  },
  {'layers', 'inputs'},
  {'train_state', 'task', 'optimizers', 'schedules', 'metrics'},
  {
    'checkpoint_source',
    'checkpoints',
    'checksums',
    'compiled_step',
    'compiler',
    'coordinator',
    'decoding',
    'distributed',
    'evaluation',
    'folder_lock',
    'goodput',
    'hlo',
    'in_flight',
    'cpu_memory',
    'kept_programs',
    'memory_check',
    'mesh_check',
    'peers',
    'preemption',
    'profiling',
    'rendezvous',
    'reporting',
    'restoring',
    'save_errors',
    'save_times',
    'saving',
    'scoring',
    'spikes',
    'states',
    'summaries',
    'trainer',
    'unfinished_folder',
    'variables',
    'watchdog',
    'zarr_array',
  },
  {'other_names', 'params', 'experiment', 'experiments'},
  {
    'aot',
    'configuration',
    'contrib',
    'eval_tasks',
    'inference',
    '__main__',
    'main',
    'programs',
    'targets',
    'tools',
    'weights',
    'zero_shot',
  },
]
KNOW_FIDDLE = {'templates'} | GROUPS[4] | GROUPS[5]
EXTRAS = {
  'tensorflow',
  'seqio',
  'torch',
  'transformers',
  'transformer_engine',
  'tensorflow_datasets',
  'safetensors',
  'gguf',
  'tokenizers',
  'jinja2',
  'datasets',
  'pyarrow',
  'lm_eval',
  'qwix',
}


def unit(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def imports(path: pathlib.Path):
  """(module, is inside a function) of every import; TYPE_CHECKING blocks left out."""
  tree = ast.parse(path.read_text())
  inside = {
    id(n)
    for f in ast.walk(tree)
    if isinstance(f, ast.FunctionDef)
    for n in ast.walk(f)
    if isinstance(n, ast.Import | ast.ImportFrom)
  }
  skipped = {
    id(n)
    for block in ast.walk(tree)
    if isinstance(block, ast.If) and getattr(block.test, 'id', '') == 'TYPE_CHECKING'
    for n in ast.walk(block)
  }
  for node in ast.walk(tree):
    if id(node) in skipped:
      continue
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, id(node) in inside
    elif isinstance(node, ast.ImportFrom) and node.module:
      if node.module == 'paxlite':
        for alias in node.names:
          yield f'paxlite.{alias.name}', id(node) in inside
      else:
        yield node.module, id(node) in inside


FILES = [p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py' or p.parent.name == 'data']


def test_every_module_has_a_group():
  assert {unit(p) for p in FILES} == set().union(*GROUPS)


def test_imports_go_downward():
  level = {name: i for i, group in enumerate(GROUPS) for name in group}
  wrong = [
    f'{path.relative_to(ROOT)} imports {module}'
    for path in FILES
    for module, _ in imports(path)
    if module.startswith('paxlite.') and level[module.split('.')[1]] > level[unit(path)]
  ]
  # the tool that trains the packaged tokenizer reads text as an input does
  assert wrong == ['paxlite/data/build.py imports paxlite.inputs.text']


def test_who_knows_fiddle():
  knowing = {unit(p) for p in FILES if any(m.split('.')[0] == 'fiddle' for m, _ in imports(p))}
  assert knowing <= KNOW_FIDDLE


def test_extras_are_imported_inside_functions():
  wrong = [
    (str(path), module)
    for path in FILES
    for module, inside in imports(path)
    if module.split('.')[0] in EXTRAS and not inside
  ]
  # a model of the harness is a subclass of its class; nothing imports that module
  assert {path for path, _ in wrong} == {str(PACKAGE / 'tools' / 'lm_eval.py')}


def test_one_batch_is_followed_in_6_files_and_1200_lines():
  """From the file to the parameter update: what a reader opens."""
  way = [
    'inputs/base.py',
    'inputs/rows.py',
    'evaluation.py',
    'trainer.py',
    'task.py',
    'optimizers.py',
  ]
  assert sum(len((PACKAGE / f).read_text().splitlines()) for f in way) <= 1200


def test_modules_stay_small():
  long = [str(p) for p in PACKAGE.rglob('*.py') if len(p.read_text().splitlines()) > 450]
  assert long == []
