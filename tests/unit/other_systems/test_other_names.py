"""Names of Pax, MaxText, transformers and seqax: each works, or is answered in one line."""

import re
import typing
from collections.abc import Iterator

import pytest

from paxlite import main
from paxlite.adapters.attributes import AdapterChoices
from paxlite.config.attributes import attribute_types, parse
from paxlite.contrib.gpu.scripts_gpu import (
  configs,
  download_boolq,
  download_lambada,
  download_the_pile,
  tfds_datasets,
)
from paxlite.core.errors import UserError
from paxlite.experiments.datasets import DocumentFiles, Mixture
from paxlite.experiments.registry import experiments, find
from paxlite.other_systems import other_names
from paxlite.other_systems.answers import Answer, names_of
from paxlite.tools import train
from paxlite.tools.commands import commands
from paxlite.transformer_engine import command as convert_te
from paxlite.weights.commands import import_weights
from tests.support import runs

PAX, ATTRIBUTES = names_of('pax'), other_names.LIBRARIES
OPTIONS = {flag.removeprefix('--') for flag in main.PARSER._option_string_actions} - {'-h', 'help'}
GPU = 'contrib.gpu.scripts_gpu.configs'
GPU_FOLDER = 'paxlite/contrib/gpu/scripts_gpu'
TINY = '--fdl_config=TinyGPT'
PLACEHOLDERS = """
  EXPERIMENT FOLDER FILE NAME VALUE VERSION SPLIT CONFIGURATION RUN CHECKPOINT
"""
# Variables of the environment, and names of XLA and JAX, that answers may name.
OUTSIDE = """
  HF_TOKEN JAX_COMPILATION_CACHE_DIR JAX_DEBUG_NANS JAX_DEFAULT_MATMUL_PRECISION JAX_ENABLE_CHECKS
  JAX_PLATFORMS JAX_TRACEBACK_FILTERING MLFLOW_EXPERIMENT_NAME TRACKIO_PROJECT WANDB_PROJECT
  ENABLE_TE ENABLE_FP8 NCCL LL128 DCN ICI SIGTERM YAML JSON GPT GPU GPUS XLA JAX TFDS FSDP BOS EOS
  README
"""


@pytest.fixture(scope='module')
def known() -> set[str]:
  """The attributes of all experiments."""
  classes = [*experiments().values(), DocumentFiles, Mixture, AdapterChoices]
  return {name for cls in classes for name in attribute_types(cls)}


def parsed(capsys, *flags: str) -> str:
  """What is printed about flags before anything runs; checks that it is at most one line."""
  main.parsed([TINY, '--dry_run', *flags])
  printed = capsys.readouterr()
  assert (printed.out, printed.err.count('\n') <= 1) == ('', True)
  return printed.err


def answers() -> Iterator[tuple[str, Answer]]:
  """Every name of another library, and its answer."""
  others = (
    *(table for name, table in PAX.items() if name not in ('ATTRIBUTES', 'VARIABLES')),
    names_of('maxtext')['CONVERT_LLAMA'],
  )
  for names in (*ATTRIBUTES.values(), *others):
    yield from names.items()


def choices(annotation: object) -> set[str]:
  """The strings that an attribute of this type may have or hold."""
  if typing.get_origin(annotation) is typing.Literal:
    return set(map(str, typing.get_args(annotation)))
  return set().union(*map(choices, typing.get_args(annotation)))


def _choices_of(cls: type) -> set[str]:
  return set().union(*map(choices, attribute_types(cls).values()))


def _flags_of_commands() -> set[str]:
  """The flags of all commands, with those that are words too, such as --checkpoint."""
  parsers = filter(None, (command.parser for command in commands().values()))
  return {flag.lstrip('-') for parser in parsers for flag in parser._option_string_actions}


def test_what_answers_name_exists(known):
  values = {value for cls in experiments().values() for value in _choices_of(cls)}
  there = known | values | set(experiments()) | {*OUTSIDE.split(), *PLACEHOLDERS.split()}
  flags = {*OPTIONS, 'fdl', *_flags_of_commands()}
  for name, answer in answers():
    said = answer.sentence()
    for word in re.findall(r'(?<![\w.])[A-Z][A-Z0-9_]{2,}\b(?![a-z])', said):
      is_start = word.endswith('_') and any(k.startswith(word) for k in known)
      assert is_start or word in there, (name, word)
    for flag in re.findall(r'(?<!\w)--([a-z][\w-]*)', said):
      assert flag in flags, (name, flag)
    for command in re.findall(r'\bpaxlite ([a-z][\w-]+)', said):
      assert command in commands() or command in ('and', 'has', 'knows', 'trains'), (name, command)
    for path in re.findall(r'[\w./]+(?:/\w+)?\.(?:md|py|sub|sh)\b', said):
      folders = ('', 'paxlite', GPU_FOLDER, 'scripts')
      assert any((runs.ROOT / folder / path).is_file() for folder in folders), (name, path)
    assert 'paxlite.tools' not in said, name
    assert 'tools.' not in said, name
    for experiment in re.findall(r'\b[A-Z][A-Za-z]+\d+[BM]\b', said):
      find(experiment)


@pytest.mark.parametrize('library', ATTRIBUTES)
def test_every_attribute_is_answered(known, library):
  for name, answer in ATTRIBUTES[library].items():
    hint = other_names.attribute_hint(name)
    if answer.kind == 'same':
      assert name in known, name
    else:
      assert library != 'Pax' or name not in known, name
      assert answer.target or answer.text, name
      assert answer.sentence() in hint or f'It is {answer.target} here' in hint, name
    if answer.kind == 'renamed':
      assert answer.target in known, name
    assert '\n' not in hint
    assert hint == '' or hint.endswith('. '), hint


def test_an_attribute_of_pax_is_not_taken_for_a_near_name():
  for name, said in {
    'USE_MQA': 'It is NUM_KV_HEADS here',
    'TARGET_LOG_PPLX': 'Not supported: MAX_STEPS or EARLY_STOPPING_PATIENCE ends',
    'NUM_STAGES': 'A pipeline is the mesh axis stage',
  }.items():
    with pytest.raises(UserError, match=f'has no attribute {name}. .*{said}') as error:
      parse(find('TinyGPT'), name, '1')
    assert 'Did you mean' not in str(error.value)


def test_libraries_that_differ_are_named():
  hint = other_names.attribute_hint('eval_steps')
  assert 'In MaxText: It is MAX_EVAL_BATCHES here. ' in hint
  assert 'In transformers: It is EVAL_INTERVAL_STEPS here. ' in hint
  assert other_names.attribute_hint('learning_rate') == 'It is LEARNING_RATE here. '
  assert other_names.attribute_hint('NUM_EXPERTS') == 'Experiments with experts have it. '


def test_every_flag_of_pax_works_or_is_answered(capsys):
  assert len(PAX['FLAGS']) >= 35
  for name, answer in PAX['FLAGS'].items():
    if answer.kind == 'same':
      assert name in OPTIONS or name == 'fdl', name
      continue
    if answer.accepted == 'any':
      for flag in (f'--{name}', f'--no{name}', f'--{name}=False', f'-{name}=true'):
        assert f'--{name} does nothing here: {answer.text}.' in parsed(capsys, flag)
      continue
    if answer.accepted == 'false':
      for flag in (f'--no{name}', f'--{name}=False', f'--{name}=0'):
        assert parsed(capsys, flag) == ''
    with pytest.raises(UserError) as error:
      parsed(capsys, f'--{name}=1')
    assert str(error.value) == f'Unknown command line flag {name!r}. {answer.sentence()}'


def test_flags_of_paxlite_are_never_taken_for_those_of_others():
  for name in OPTIONS:
    for flag in (f'--{name}', f'--no{name}', f'--{name}=x'):
      assert other_names.warning_about(flag) is None


@pytest.mark.parametrize('mode', PAX['MODES'])
def test_every_mode_of_pax_works_or_is_answered(capsys, mode):
  answer = PAX['MODES'][mode]
  if answer.kind == 'same':
    assert parsed(capsys, f'--mode={mode}') == ''
    return
  with pytest.raises(UserError) as error:
    parsed(capsys, f'--mode={mode}')
  assert str(error.value).endswith(f'decode_once>. {answer.sentence()}')


def test_the_flag_exp_is_fdl_config():
  assert main.parsed(['--exp=Pile126M', '--dry_run']).fdl_config == 'Pile126M'


def test_every_experiment_of_pax_is_found_by_its_path_or_answered():
  for name, answer in PAX['EXPERIMENTS'].items():
    if hasattr(configs, name):
      ours = getattr(configs, {'GPT5B': 'Pile5B', 'GPT175B': 'Pile175B'}.get(name, name))
      assert isinstance(ours, type)
      if hasattr(ours, 'MODEL_DIMS'):
        assert find(f'paxml.{GPU}.{name}') is ours
      assert find(f'paxlite.{GPU}.{name}') is getattr(configs, name)
      assert answer.kind in ('same', 'renamed')
      assert answer.kind == 'same' or getattr(configs, name).__name__ == answer.target
      continue
    for path in (f'paxml.{GPU}', 'paxml.tasks.lm.params.c4', 'paxlite.tasks.lm.params.c4'):
      with pytest.raises(UserError) as error:
        find(f'{path}.{name}')
      assert str(error.value).endswith(answer.sentence()), name
    with pytest.raises(UserError) as error:
      find(name)
    assert str(error.value).endswith(answer.sentence())
  with pytest.raises(
    UserError, match=r'no module is named paxml. paxlite has the experiments of Pa'
  ):
    find('paxml.tasks.lm.params.nvidia.NVIDIA5B')


def test_classes_derive_from_paxs_names_in_paxs_order():
  class Mine(configs.GPT126MBase, configs.PileUnsupervisedDataset):
    NUM_LAYERS = 6

  class Other(configs.GLaM64B64EBase, configs.SyntheticDataset):
    NUM_LAYERS = 4

  assert (Mine().NUM_LAYERS, Mine().dataset) == (6, 'SeqIO the_pile_lm')
  assert (Other().NUM_EXPERTS, Other().dataset) == (64, 'synthetic')
  Mine().train_input()
  assert Other().LEARNING_RATE == 2e-5
  assert Other().ADAM_BETA1 == 0.9


def test_choices_may_be_in_capitals_or_small_letters():
  tiny = find('TinyGPT')
  assert parse(tiny, 'CHECKPOINT_POLICY', '"save_nothing"') == 'SAVE_NOTHING'
  assert parse(tiny, 'ACTIVATION_CLS', 'GELU') == 'gelu'
  with pytest.raises(UserError, match='must be one of'):
    parse(tiny, 'CHECKPOINT_POLICY', 'save_something')


def test_key_value_arguments_are_all_answered():
  said = other_names.arguments_hint(['base.yml', 'steps=10', 'ici_fsdp_parallelism=8', 'other=1'])
  assert said == (
    '--fdl_config=EXPERIMENT is used in place of a YAML file. '
    'steps: It is MAX_STEPS here. Write MAX_STEPS=VALUE. '
    'ici_fsdp_parallelism: It is the axis data of ICI_MESH_SHAPE.'
  )


def test_every_flag_of_the_converters_is_accepted_or_answered():
  tables = (PAX['CONVERT_TE'], PAX['CONVERT_LLAMA'], names_of('maxtext')['CONVERT_LLAMA'])
  for names in tables:
    for name, answer in names.items():
      flag = '--' + name.replace('_', '-')
      for argv in ([flag, 'x', '--to=y'], [f'{flag}=x', '--to=y'], [flag, '--to=y']):
        if answer.kind == 'absent':
          with pytest.raises(UserError, match=f'{flag}: Not supported: '):
            other_names.translated(argv, names)
          continue
        kept, warnings = other_names.translated(argv, names)
        if answer.kind == 'needless':
          assert (kept, len(warnings)) == (['--to=y'], 1)
        elif answer.kind == 'same':
          assert (kept, warnings) == (argv, [])
        else:
          assert ' '.join(kept) == ' '.join(argv).replace(flag, answer.target)


def test_the_converters_run_with_flags_of_others(tmp_path, capsys):
  sizes = '--fw pax --num-of-layer 12 --num-of-head=12 --head-dim 64 --mlp-intermediate-dim 3072'
  flags = [f'--input-path={tmp_path}/none', '--output-path', 'out', '--direction=fw2te']
  with pytest.raises(UserError, match='none is not a folder'):
    convert_te.main([*flags, *sizes.split(), '--weight-only', '--use-gated-activations'])
  assert capsys.readouterr().err.count('does nothing here: ') == 7
  with pytest.raises(UserError, match=r'/llama 7b does not exist'):
    import_weights.main(['--base', f'{tmp_path}/llama 7b', '--pax', 'out', '--model-size', '7b'])
  with pytest.raises(UserError, match=r'/meta does not exist'):
    import_weights.main([f'--base-model-path={tmp_path}/meta', '--maxtext-model-path=out'])


def test_the_download_scripts_take_tfds_data_dir_from_the_environment(tmp_path, monkeypatch):
  """As Pax's README calls them."""
  monkeypatch.setenv('TFDS_DATA_DIR', f'{tmp_path}/tfds')
  built = []
  monkeypatch.setattr(tfds_datasets, 'build', lambda *given: built.append((given[0], given[4])))
  (tmp_path / 'train.jsonl').touch()
  (tmp_path / 'dev.jsonl').touch()
  download_boolq.main([f'--source={tmp_path}'])
  download_lambada.main([f'--source={tmp_path}/dev.jsonl'])
  download_the_pile.main([f'--source={tmp_path}'])
  assert built == [(n, f'{tmp_path}/tfds') for n in ('bool_q', 'lambada', 'the_pile')]


@pytest.mark.parametrize(
  ('typed', 'meant'),
  [
    ('smollm135mlora', 'paxlite finetune SmolLM135M --method=lora CHECKPOINT_RESTORE_PATH='),
    ('llama2-7b', 'Did you mean LLaMA7B or '),
    ('Qwen/Qwen2.5-0.5B-Instruct', 'Did you mean Qwen2_5_0_5B or '),
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'Did you mean SmolLM135M or '),
    ('lora', 'paxlite list lora lists some'),
    ('mine/gpt.py:MyGPT', 'Write --fdl_config=mine.gpt.MyGPT'),
    ('mine.py', 'Write --fdl_config=mine.CLASS'),
    ('paxml/contrib/gpu/scripts_gpu/configs.GPT126M', 'It is --fdl_config=GPT126M here.'),
    ('xyzzy', 'List them: paxlite list'),
  ],
)
def test_an_experiment_that_does_not_exist_gets_a_suggestion(typed, meant):
  with pytest.raises(UserError) as error:
    find(typed)
  assert meant in str(error.value)


def test_a_flag_of_others_with_its_value_as_the_next_word_is_named():
  """The value is no second experiment."""
  for flag, said in {'--num_train_epochs': 'NUM_EPOCHS', '--report_to': 'TRACKERS'}.items():
    with pytest.raises(UserError, match=f'Unknown command line flag .* It is {said} here'):
      train.PARSER.parsed(['TinyGPT', flag, '3'])
  with pytest.raises(UserError, match="'wide' is one name too many"):
    train.PARSER.parsed(['TinyGPT', 'wide', '--dry_run'])
