"""Checks that rooms import only downward, and that no module is in a circle of imports."""

import ast
import collections
import functools
import graphlib
import pathlib
import re
from collections.abc import Iterator

from paxlite import extensions, layers

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / 'paxlite'

# From the bottom up: a module imports only from its own room and from rooms before it.
ROOMS = [
  'core', 'extensions', 'files', 'config', 'cli', 'parallel', 'optim', 'data', 'processes',
  'compilation', 'checkpointing', 'stores', 'layers', 'losses', 'tracking', 'training', 'pipeline',
  'experiments', 'context_parallelism', 'programs', 'main', 'more_optimizers', 'quantization',
  'adapters', 'doctor', 'tokenization', 'trackers', 'run_data', 'local_checkpoints', 'chats',
  'generation', 'other_systems', 'finetuning', 'experiments.finetuning', 'environments', 'eval',
  'weights', 'hub', 'transformer_engine', 'aot', 'serving', 'training_api', 'proof', 'tools',
  'report', 'ladder', 'recipes', 'contrib', '__main__',
]  # fmt: skip
KNOW_FIDDLE = {
  'experiments', 'eval', 'weights', 'aot', 'programs', 'run_data', 'finetuning',
  'experiments.finetuning', 'generation', 'ladder', 'recipes', 'tools', 'contrib',
  'transformer_engine', 'quantization', 'adapters', 'training_api', 'more_optimizers',
}  # fmt: skip
EXTRAS = {
  'tensorflow', 'seqio', 'torch', 'transformers', 'transformer_engine', 'tensorflow_datasets',
  'safetensors', 'gguf', 'huggingface_hub', 'tokenizers', 'jinja2', 'llguidance', 'starlette',
  'uvicorn', 'datasets', 'fsspec', 'pyarrow', 'lm_eval', 'qwix', 'wandb', 'mlflow', 'trackio',
  'obstore', 'fastokens', 'reasoning_gym', 'verifiers', 'google',
}  # fmt: skip


def module_name(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


FILES = list(PACKAGE.rglob('*.py'))
# without the package's own file, which imports its public names when they are used
MODULES = {module_name(p): p for p in FILES if p.parent != PACKAGE or p.name != '__init__.py'}


def room(module: str) -> str:
  if family(module) and module.endswith(('.weights', '.gguf')):
    return 'weights'  # how the engine finds the tables of families
  whole = '.'.join(module.split('.')[1:3])
  return whole if whole in ROOMS else module.split('.')[1]


def family(module: str) -> str:
  """Returns the family to whose folder a module belongs; '' for others."""
  found = '.'.join(module.split('.')[:3])
  is_folder = found.startswith('paxlite.experiments.') and MODULES[found].name == '__init__.py'
  return found.rpartition('.')[2] if is_folder and not found.endswith('.parts') else ''


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, bool]]:
  """Returns (module, is inside a function) of every import, including those for type checkers."""
  return list(_imports(ast.parse(path.read_text())))


def _imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
  if isinstance(node, ast.Import):
    for alias in node.names:
      yield alias.name, inside
  elif isinstance(node, ast.ImportFrom) and node.module:
    for alias in node.names:
      whole = f'{node.module}.{alias.name}'
      yield (whole if whole in MODULES else node.module), inside
  elif not isinstance(node, ast.expr):  # no expression holds an import
    for child in ast.iter_child_nodes(node):
      yield from _imports(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_rooms():
  assert {room(m) for m in MODULES} == set(ROOMS)


def test_imports_go_downward():
  wrong = [
    f'{name} imports {module}'
    for name, path in MODULES.items()
    for module, _ in imports(path)
    if module.startswith('paxlite.') and ROOMS.index(room(module)) > ROOMS.index(room(name))
  ]
  assert wrong == []


# Besides Pax's scripts: what reads files of LLaMA's that are not Hugging Face's, and Pax's GPT;
# and what reads the states of hybrid models
KNOW_FAMILIES = {
  'weights.meta', 'weights.gguf_keys', 'weights.commands.import_weights',
  'weights.mamba_keys', 'weights.state_layout', 'recipes.bundled.chat_small', 'recipes.dial',
  'experiments.gpt_bigcode', 'experiments.gpt_neo', 'experiments.gptj', 'experiments.minimax',
}  # fmt: skip


def test_nothing_but_families_knows_a_family():
  """Experiments are found by name, weights by the tables of the folders."""
  wrong = [
    f'{name} imports {module}'
    for name, path in MODULES.items()
    for module, _ in imports(path)
    if module in MODULES and family(module) and not family(name)
    if name.removeprefix('paxlite.') not in KNOW_FAMILIES and room(name) != 'contrib'
  ]
  assert wrong == []


def test_what_layers_know():
  known = {room(m) for name, path in MODULES.items() if room(name) == 'layers'
           for m, _ in imports(path) if m.startswith('paxlite.')}  # fmt: skip
  assert known == {'core', 'extensions', 'config', 'parallel', 'layers'}


def test_experiments_know_no_checkpoints():
  """What they need of weights, programs read: see paxlite.programs.weights_model."""
  wrong = [
    f'{name} imports {module}'
    for name, path in MODULES.items()
    for module, _ in imports(path)
    if room(name) == 'experiments' and module.startswith('paxlite.checkpointing')
  ]
  assert wrong == []


# Pax's scripts have classes of these names, whose tasks are others than those of the sizes.
SHARED_NAMES = {'LLaMA7B', 'LLaMA13B', 'LLaMA70B'}


def test_no_two_classes_share_a_name():
  names = [x for p in FILES for x in re.findall(r'^class ([A-Z]\w*)', p.read_text(), re.MULTILINE)]
  counts = collections.Counter(names)
  assert {name for name, count in counts.items() if count > 1} == SHARED_NAMES


def test_no_module_is_in_a_circle():
  graph = {
    name: {m for m, _ in imports(path) if m in MODULES and m != name}
    for name, path in MODULES.items()
  }
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_who_knows_fiddle():
  knowing = {
    m for m, p in MODULES.items() if any(i.split('.')[0] == 'fiddle' for i, _ in imports(p))
  }
  assert {m for m in knowing if room(m) not in KNOW_FIDDLE} == {'paxlite.config.templates'}


def test_json_is_parsed_in_two_modules():
  """Others may have written what is read: deep nesting raises RecursionError in Python's parser."""
  found = {
    m for m, p in MODULES.items() if re.search(r'json\.loads?\(|json import loads?', p.read_text())
  }
  assert found == {'paxlite.files.json_files', 'paxlite.core.json_text'}


def test_extras_are_imported_inside_functions():
  wrong = [
    name
    for name, path in MODULES.items()
    for module, inside in imports(path)
    if module.split('.')[0] in EXTRAS and not inside
  ]
  # A model of the harness is a subclass of the harness's class. No module imports it, and none but
  # what starts a server imports an application, inside a function.
  starting = {
    'paxlite.serving.api': 'paxlite.serving.command',
    'paxlite.training_api.api': 'paxlite.training_api.service',
  }
  shared = 'paxlite.serving.application'
  assert set(wrong) == {'paxlite.eval.commands.lm_eval', shared, *starting}
  for api, start in starting.items():
    assert [m for m, p in MODULES.items() if {(api, True), (api, False)} & {*imports(p)}] == [start]
  using = [m for m, p in MODULES.items() if (shared, False) in imports(p)]
  assert {*using} == {*starting, *starting.values()}


def test_shape_letters_are_those_of_the_legend():
  """This holds for names like q_BTNH; the factors A and B of LoRA are the only exception."""
  legend = set(re.findall(r'(?<![A-Za-z])([A-Z]) [a-z]', layers.__doc__))
  assert len(legend) >= 20
  wrong = {
    f'{path.relative_to(PACKAGE)}: {name}'
    for path in PACKAGE.rglob('*.py')
    if path.name not in ('lora.py', 'chat_template.py')
    for name, letters in re.findall(
      r'\b([a-z][a-z0-9_]*_([A-Za-z]*[A-Z][A-Za-z0-9]*))\b', path.read_text()
    )
    if len(letters) <= 6 and set(filter(str.isupper, letters)) - legend
  }
  assert wrong == set()


def test_the_map_is_short_and_has_every_room_and_leaf():
  page = (ROOT / 'docs/architecture.md').read_text()
  assert len(page.split()) <= 2500
  first = lambda heading: re.findall(
    r'^\| `(\w+)/`', page.split(heading)[1].split('\n## ')[0], re.M
  )
  assert sorted(first('## The leaves\n')) == sorted(extensions.BUILT_IN)
  others = {*extensions.BUILT_IN, 'tools'}
  rooms = {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
  assert {*first('## The core\n')} == rooms - others


def test_the_map_names_files_that_exist():
  """In docs/architecture.md, a file without a folder is in one that its row or item names."""
  page = (ROOT / 'docs/architecture.md').read_text()
  missing = []
  for row in re.findall(r'^(?:\||\d+\.) .*`.*', page, re.MULTILINE):
    names = re.findall(r'`([\w/]+(?:\.py|/))`', row)
    folders = {'', *(re.sub(r'[^/]*$', '', name) for name in names)}
    for name in names:
      if not any((root / folder / name).exists() for root in (PACKAGE, ROOT) for folder in folders):
        missing.append(name)
  assert missing == []


def test_docstrings_refer_to_what_exists():
  """`see X`: a file by its name, or a module, a class or a function by its last folders."""
  files = {str(path.relative_to(ROOT)) for path in [*FILES, *(ROOT / 'docs').rglob('*.md')]}
  wrong = []
  for path in FILES:
    for name in re.findall(r'\b[sS]ee ([\w/]+(?:\.\w+)+)', path.read_text()):
      if name.startswith('flax.') or re.match(r'[A-Z]', name):  # a method of a class
        continue
      if name.endswith(('.py', '.md')):
        found = any(f'/{file}'.endswith(f'/{name}') for file in files)
      else:
        parts = name.split('.')
        places = ['.'.join(parts[:n]) for n in range(1, len(parts) + 1)]
        found = any(
          (module := next((m for m in MODULES if f'.{m}'.endswith(f'.{place}')), None))
          and all(re.search(rf'\b{rest}\b', MODULES[module].read_text()) for rest in parts[n:])
          for n, place in enumerate(places, 1)
        )
      if not found:
        wrong.append(f'{path.relative_to(ROOT)}: {name}')
  assert wrong == []
