"""How every tool treats its command line and its terminal."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from paxlite import main
from paxlite.aot.commands import compile
from paxlite.cli import command_line
from paxlite.cli.parser import expanded, local, stored
from paxlite.core.errors import UserError
from paxlite.eval.commands import decode
from paxlite.programs import launch
from paxlite.report.commands import goodput
from paxlite.tools import eval, experiments, listings, new, show, train
from paxlite.tools.commands import commands
from tests.support import runs

# Each command prints letters that ASCII does not have.
PRINTING = {
  'help': ['paxlite.main', '--help'],
  'dry run': ['paxlite.main', '--fdl_config=TinyGPT', '--dry_run'],
  'experiments': ['paxlite', 'list'],
  'show': ['paxlite', 'show', 'Synthetic126M'],
  'a command': ['paxlite', 'generate', '--help'],
}


def environment(**variables: str) -> dict[str, str]:
  """Returns an environment without the settings that make Python write UTF-8 in any locale."""
  return runs.environment() | {'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'} | variables


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('what', PRINTING)
def test_terminals_that_know_ascii_alone(what):
  result = subprocess.run(
    [sys.executable, '-m', *PRINTING[what]], capture_output=True, cwd=runs.ROOT,
    env=environment(PYTHONIOENCODING='ascii', PYTHONUTF8='0', COLUMNS='150'), check=False,
  )  # fmt: skip
  assert (result.returncode, result.stderr) == (0, b'')
  text = result.stdout.decode('ascii')
  assert text
  if what == 'show':
    assert 'NUM_HEADS x DIMS_PER_HEAD equals MODEL_DIMS' in text  # × elsewhere


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('what', PRINTING)
def test_readers_that_go_away(what):
  command = ' '.join([sys.executable, '-m', *PRINTING[what]])
  result = subprocess.run(
    ['bash', '-c', f'{command} | head -c 1; exit ${{PIPESTATUS[0]}}'], capture_output=True,
    cwd=runs.ROOT, env=runs.environment(), check=False,
  )  # fmt: skip
  assert (result.returncode, result.stderr) == (0, b'')


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
@pytest.mark.parametrize('argv', [['paxlite', 'attributes'], ['paxlite']])
def test_a_full_disk_under_printed_output(argv):
  """The output is longer than the buffer in one case, and shorter in the other."""
  with open('/dev/full', 'w') as full:
    result = subprocess.run(
      [sys.executable, '-m', *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
      cwd=runs.ROOT,
    )  # fmt: skip
  wanted = 'error: the output is incomplete: No space left on device\n'
  assert (result.returncode, result.stderr) == (1, wanted)


def test_no_stdout_at_all():
  result = subprocess.run(
    ['bash', '-c', f'{sys.executable} -m paxlite list >&-'],
    stderr=subprocess.PIPE, text=True, check=False, cwd=runs.ROOT,
  )  # fmt: skip
  assert (result.returncode, result.stderr) == (0, '')


@pytest.mark.cases(fast=4, slow=4)
@pytest.mark.parametrize(
  ('argv', 'wanted'),
  [
    (['paxlite'], 'turn text into a dataset of tokens'),
    (['paxlite', '--version'], 'paxlite 0.'),
    (['paxlite', '-help'], 'turn text into a dataset of tokens'),
    (['paxlite', 'train', '--help'], 'paxlite train EXPERIMENT'),
    (['paxlite', 'train', '--help'], '--[no]enable_checkpoint_saving'),
    (['paxlite', 'list', '-help'], 'usage: paxlite list'),
    (['paxlite', 'attributes', 'learning_rate'], 'LEARNING_RATE: float = 0.001\n'),
    (['paxlite', 'completion', 'words', 'train', 'TinyG'], 'TinyGPT\n'),
    (['paxlite', 'completion', 'words', 'plan', 'TinyGPT', 'NUM_LAY'], 'NUM_LAYERS=\n'),
    (['paxlite.main', '-help'], '--job_log_dir'),
    (['paxlite.main', '--helpfull'], '--job_log_dir'),
    (['paxlite', 'completion', 'words', 'plan', '--ta'], '--target=\n'),
  ],
)
def test_ways_to_ask_what_there_is(argv, wanted):
  result = subprocess.run(
    [sys.executable, '-X', 'importtime', '-m', *argv], capture_output=True, text=True, check=False,
    cwd=runs.ROOT, env=os.environ,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr
  assert wanted in result.stdout
  assert ' jax\n' not in result.stderr, 'that would take seconds'


def test_bash_completes():
  """compopt complains outside of a real completion, which a test is not."""
  script = f"""
paxlite() {{ {sys.executable} -m paxlite "$@"; }}
eval "$(paxlite completion bash)"
COMP_WORDS=(paxlite deco); COMP_CWORD=1; _paxlite; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(paxlite train TinyGPT NUM_L); COMP_CWORD=3; _paxlite; echo "${{COMPREPLY[@]}}"
"""
  done = subprocess.run(
    ['bash', '-c', script], capture_output=True, text=True, check=True, cwd=runs.ROOT
  )
  assert done.stdout.splitlines() == ['decode', 'NUM_LAYERS= NUM_LOSS_CHUNKS=']


def test_an_unexpected_error_names_what_to_report_and_what_is_there(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(launch, 'launch', {}.__getitem__)  # no line of it is in a file of a user's
  for files, named in (((), False), (('versions.json',), True)):
    for name in files:
      (tmp_path / name).write_text('{}')
    assert main.main(['x', '--fdl_config=TinyGPT', f'--job_log_dir={tmp_path}']) == 1
    printed = capsys.readouterr().err
    assert 'TypeError: unhashable' in printed
    assert 'what `paxlite doctor` prints' in printed
    assert (f'versions.json in {tmp_path}' in printed) == named


def test_an_unexpected_error_of_a_command_says_what_to_report():
  code = 'from paxlite.cli import command_line; command_line.run(lambda argv: 1 / 0)'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False, cwd=runs.ROOT
  )
  assert done.returncode == 1
  assert 'ZeroDivisionError' in done.stderr
  assert done.stderr.endswith('what `paxlite doctor` prints, and the command.\n')


@pytest.mark.skipif(shutil.which('fish') is None, reason='needs fish')
def test_fish_completes():
  script = f"""
function paxlite; {sys.executable} -m paxlite $argv; end
paxlite completion fish | source
complete -C "paxlite deco"
complete -C "paxlite train TinyGPT NUM_LAY"
"""
  done = subprocess.run(
    ['fish', '--no-config', '-c', script], capture_output=True, text=True, check=True, cwd=runs.ROOT
  )
  assert done.stdout.splitlines() == ['decode', 'NUM_LAYERS=']


def test_the_list_needs_no_import_and_shortens_nothing(capsys):
  code = (
    'import sys; from paxlite.tools.experiments import main; main([]); '
    'print(*{"jax", "flax", "fiddle", "numpy", "rich"} & set(sys.modules))'
  )
  out = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=runs.ROOT,
    env={**os.environ, 'COLUMNS': ''},
  ).stdout  # fmt: skip
  assert out.endswith('\n\n'), 'none of them'
  assert '…' not in out
  assert max(map(len, out.splitlines())) <= 100, 'of a pipe'
  assert len(out.splitlines()) <= 50, 'a screen'
  listed = dict(re.findall(r'(\w+) ([\d.,]+[BMK])\b', out))
  assert (listed['LLaMA3_8B'], listed['Gemma3_1B'], listed['TinyGPT']) == ('8.0B', '1.0B', '31K')
  assert {row[1] for row in listings.experiments()} <= {*re.findall(r'\w+', out)}
  experiments.main(['mistral7b'])
  lines = capsys.readouterr().out.splitlines()
  assert {x.split()[0] for x in lines if 'Mistral7B' in x} == {
    'Mistral7B', 'SyntheticMistral7B', 'Mistral7B_v0_2', 'Mistral7B_v0_3',
  }  # fmt: skip
  with pytest.raises(UserError, match="no experiment has 'nothing' in its name or dataset"):
    experiments.main(['nothing'])
  for screen in (200, 100, 80):
    lines = experiments.table('', screen).splitlines()
    assert max(map(len, [*lines, *experiments.names(screen).splitlines()])) <= screen
    assert ('SAVE_DOT_WITH_NO_BATCH_DIM' in '\n'.join(lines)) == (screen == 200)


def test_show_says_what_values_mean(capsys, monkeypatch):
  monkeypatch.delenv('COLUMNS', raising=False)
  show.main(['TinyGPT', 'LOSS_SPIKE_FACTOR=2'])
  out = capsys.readouterr().out
  assert 'SAMPLE_PROMPT = None  # prompt to continue after training; None: none\n' in out
  assert 'LOSS_SPIKE_WINDOW = 100  # steps in the mean for LOSS_SPIKE_FACTOR\n' in out
  assert re.search(r'^OFFLOAD_ACTIVATIONS = \[\]  # .', out, re.M)  # declared over three lines
  assert "NORM_SCALE_OFFSET = 1.0  # number added to a norm's stored scale\n" in out
  assert out.index('## Attention') < out.index('\nNUM_HEADS = ') < out.index('## Mesh of devices')


@pytest.mark.parametrize(
  ('main', 'argv', 'flag'),
  [
    (new.main, ['gs://b/e.py'], '--output'),
    (compile.main, ['TinyGPT', '--target=v5e-8', '--save=gs://b/s'], '--save'),
  ],
)
def test_object_stores_are_refused_for_code_and_programs(main, argv, flag):
  with pytest.raises(UserError, match=f'{flag}=gs://b/.* is in an object store'):
    main(argv)


def test_every_path_of_a_command_is_read_as_one():
  """An address is not taken for the name of a folder here: each has the type of a path."""
  names_a_place = re.compile(r'\b(?:file|folder|where|to write|to make)\b')
  parsers = [main.PARSER, *(c.parser for c in commands().values() if c.parser is not None)]
  found = {
    f'{parser.prog} {action.option_strings[0]}': action.type
    for parser in parsers
    for action in parser._actions
    if action.option_strings and names_a_place.search(action.help) and not action.nargs
  }
  assert found.keys() >= {'paxlite tokenize --output', 'paxlite compile --save'}
  are_read_by_their_commands = {name for name in found if name.endswith(' --flagfile')}
  others = {n for n, kind in found.items() if kind not in (stored, local, expanded)}
  assert others - are_read_by_their_commands == set()


@pytest.mark.parametrize(
  ('argv', 'wanted'),
  [
    (['--flagfile'], '--flagfile= cannot be read'),
    (['TinyGPT'], '--target is missing: paxlite compile EXPERIMENT --target='),
    (['--target=here'], 'EXPERIMENT is missing: paxlite compile EXPERIMENT --target='),
    (['TinyGPT', '--target'], 'Missing value for flag --target. See paxlite compile --help'),
    (['TinyGPT', '--target', '--'], 'Missing value for flag --target. See paxlite compile --help'),
    (['TinyGPT', '--targets=here'], "flag 'targets'. Did you mean --target?"),
    (['TinyGPT', '--target=here', '--per_device_batch_size=4'], 'It is PERCORE_BATCH_SIZE here.'),
    (['TinyGPT', 'DemoGPT', '--target=here'], "'DemoGPT' is one name too many: see paxlite comp"),
    (['TinyGPT', '--target=here', '--fdl.X'], '--fdl.X has no value: write --fdl.X=VALUE'),
  ],
)
def test_mistakes_are_one_line(argv, wanted):
  parser = main.PARSER if argv == ['--flagfile'] else compile.PARSER
  with pytest.raises(UserError, match=re.escape(wanted)):
    parser.parsed(argv)


@pytest.mark.parametrize(
  'argv',
  [
    ['-fdl_config=TinyGPT', '-job_log_dir', 'x', '-noenable_checkpoint_saving', '-dry_run'],
    ['--exp', 'TinyGPT', '--job_log_dir=x', '--enable_checkpoint_saving=0', '--dry_run=True'],
    ['--fdl_config', 'TinyGPT', '--folder', 'x', '--enable_checkpoint_saving=f', '--nocheck_memory',
     '--check_memory', '--dry_run=t', '--num_hosts', '2', '--num_hosts=1'],
    ['--fdl_config=A', '--flagfile=FILE', '--dry_run'],
  ],
)  # fmt: skip
def test_flags_in_the_ways_of_absl(tmp_path, argv):
  inner, outer = tmp_path / 'inner', tmp_path / 'outer'
  inner.write_text('# a comment\n// another\n\n--fdl.SEED=7\n--noenable_checkpoint_saving\n')
  outer.write_text(f'  --job_log_dir=x\n--flagfile={inner}\n--fdl_config=TinyGPT\n')
  found = main.PARSER.parsed([word.replace('FILE', str(outer)) for word in argv])
  assert (found.fdl_config, found.job_log_dir, found.dry_run) == ('TinyGPT', 'x', True)
  assert found.enable_checkpoint_saving is False
  assert (found.check_memory, found.mode, found.fiddler) == (True, 'train', [])
  assert found.attributes == ({'SEED': '7'} if '--flagfile=FILE' in argv else {})


def test_a_flag_file_that_names_itself(tmp_path):
  (tmp_path / 'flags').write_text(f'--flagfile {tmp_path}/flags\n'.replace(' ', '='))
  with pytest.raises(UserError, match='flags names itself'):
    main.PARSER.parsed([f'--flagfile={tmp_path}/flags'])


def test_home_is_expanded(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  with pytest.raises(UserError, match='/home/me/run holds no run'):
    goodput.main(['~/run'])


def test_what_cannot_be_written_is_spelled():
  with command_line.printing():
    pass
  assert '8 × 1 → é'.encode('ascii', 'paxlite.spelled') == b'8 x 1 -> \\xe9'


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_library_that_swallows_signals(number):
  """A library that calls Python may drop SystemExit and KeyboardInterrupt; the tool ends anyway."""
  code = (
    'import time\n'
    'from paxlite.cli import command_line as cli\n'
    'cli._END_SECONDS = 0.5\n'
    'def main(argv):\n'
    '  while True:\n'
    '    try: print("here", flush=True) or time.sleep(60)\n'
    '    except BaseException: pass\n'
    'cli.run(main)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code], cwd=runs.ROOT, env=runs.environment(), text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  ) as process:  # fmt: skip
    assert process.stdout.readline() == 'here\n'
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
  assert process.returncode == 128 + number
  assert stderr == 'interrupted; unfinished output stays where it is\n'


def test_words_after_train_and_eval():
  given = train.PARSER.parsed(['TinyGPT', 'learning_rate=1', '--folder=x', '--fiddler', 'a.b'])
  assert (given.mode, given.job_log_dir, given.fdl_config) == ('train', 'x', 'TinyGPT')
  assert (given.attributes, given.fiddler) == ({'learning_rate': '1'}, ['a.b'])
  assert train.PARSER.parsed(['mine.Own']).job_log_dir == 'runs/Own'
  assert train.PARSER.parsed(['TinyGPT', '--dry_run']).job_log_dir is None
  given = eval.PARSER.parsed(['gs://bucket/run', '--before'])
  assert (given.mode, given.job_log_dir, given.before) == ('eval', 'gs://bucket/run', True)
  with pytest.raises(UserError, match=r'^runs/none is not a folder: name a run folder, as in pax'):
    eval.PARSER.parsed(['runs/none'])
  with pytest.raises(UserError, match=r'^RUN is missing: see paxlite decode --help'):
    decode.PARSER.parsed([])
