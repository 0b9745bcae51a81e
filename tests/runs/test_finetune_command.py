"""`paxlite finetune`: from imported weights to an export, over a kill, and runs of former names."""

import json
import shutil
import signal
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

import paxlite
from paxlite.aot.planning.search import stated
from paxlite.aot.planning.workers import restored
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.base import full_name
from paxlite.experiments.finetuning import HuggingFaceLoRA
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import class_of, find
from paxlite.finetuning import command as finetune
from paxlite.programs.launch import build_experiment
from tests.support import runs
from tests.support.imported import run_import

WORDS = ['alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta']
SHORT = (
  'MAX_SEQ_LEN=32', 'PERCORE_BATCH_SIZE=2', 'MAX_STEPS=4', 'CHECKPOINT_EVERY_N_STEPS=2',
  'SUMMARY_INTERVAL_STEPS=1', 'EVAL_INTERVAL_STEPS=100', 'ICI_MESH_SHAPE=[1,1,1]',
  'DCN_MESH_SHAPE=[1,1,1]', 'FPROP_DTYPE=float32', 'LEARNING_RATE=1e-2', 'LR_COS_WARMUP=1',
)  # fmt: skip


@pytest.fixture(scope='module')
def weights(tmp_path_factory) -> str:
  """A folder of imported weights of a tiny Llama, with a tokenizer."""
  transformers = pytest.importorskip('transformers')
  folder = tmp_path_factory.mktemp('tiny')
  config = transformers.LlamaConfig(
    vocab_size=8192, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=2,
  )  # fmt: skip
  transformers.LlamaForCausalLM(config).save_pretrained(folder / 'hf')
  run_import('hf', folder / 'hf', folder / 'weights', f'--tokenizer={packaged.VOCAB}')
  return str(folder / 'weights')


@pytest.fixture
def data(tmp_path) -> list[str]:
  """TRAIN_FILES and EVAL_FILES: which word follows, and which one is before."""
  following = [dict(inputs=f'{a} goes before', targets=f' {b}') for a, b in pairwise(WORDS)]
  before = [dict(inputs=f'{b} goes after', targets=f' {a}') for a, b in pairwise(WORDS)]
  words = []
  for name, pairs in (('TRAIN', following), ('EVAL', before)):
    path = tmp_path / f'{name}.jsonl'
    path.write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
    words.append(f'{name}_FILES={path}')
  return words


def asked(folder) -> str:
  """Returns a task that asks which word follows."""
  path = folder / 'next.json'
  path.write_text(json.dumps(dict(
    kind='cloze', files='TRAIN.jsonl', doc_to_text='{{inputs}}', doc_to_target='{{targets}}',
  )))  # fmt: skip
  return f"['{path}']"


def command(*words: str):
  result = runs.ended([sys.executable, '-m', 'paxlite', *words], runs.environment())
  assert result.returncode == 0, f'{words}\n{result.stdout}\n{result.stderr}'
  return result.stdout


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('method', ['sft', 'lora'])
def test_from_weights_over_a_kill_to_an_export(method, weights, data, tmp_path):
  tasks = f'EVAL_TASKS={asked(tmp_path)}'
  words = [weights, f'--method={method}', *data, *SHORT, tasks]
  whole, run = str(tmp_path / 'whole'), str(tmp_path / 'run')
  ended = command('finetune', *words, f'--folder={whole}')

  kind = {'sft': 'SFT', 'lora': 'LoRA'}[method]
  flags = f'--fdl_config=HuggingFace{kind}', f'--fdl.CHECKPOINT_RESTORE_PATH={weights}'
  killed = ['-m', 'tests.support.killed_main', *flags, *words[2:], f'--job_log_dir={run}']
  result = runs.ended([sys.executable, *killed], runs.environment() | {'KILL_AT': 'before_step:3'})
  assert result.returncode == -9
  assert max(runs.losses(run)) < 4
  continued = command('finetune', *words, f'--folder={run}')
  assert runs.losses(run) == runs.losses(whole)
  found = {r['step']: r for r in runs.records(tmp_path / 'run', 'eval_metrics.jsonl')
           if r['input'] == 'next'}  # fmt: skip
  assert found.keys() == {0, 4}
  assert found[4]['perplexity_per_word'] != found[0]['perplexity_per_word']
  table = lambda out: out.partition('Before and after the fine-tuning:\n')[2].splitlines()[:3]
  assert table(ended) == table(continued)
  values = [f'{found[step]["perplexity_per_word"]:.4f}' for step in (0, 4)]
  assert [row.split()[:4] for row in table(ended)][2] == ['next', 'perplexity_per_word', *values]
  command('report', run, f'--markdown={tmp_path / "report.md"}')
  assert 'Before and after fine-tuning' in (tmp_path / 'report.md').read_text()
  assert 'is complete' in command('finetune', *words, f'--folder={run}')

  found = json.loads((tmp_path / 'run' / 'experiment.json').read_text())
  assert found['experiment'] == f'paxlite.experiments.finetuning.HuggingFace{kind}'
  assert (found['values']['MODEL'], found['values']['NUM_LAYERS']) == ('LLaMA', 2)

  assert 'eval eval at step 4: loss ' in command('eval', run)
  command('generate', run, 'alpha goes before', '--max_new_tokens=2')
  command('export', run, '--to=hf', f'--path={tmp_path / "exported"}')
  exported = json.loads((tmp_path / 'exported' / 'config.json').read_text())
  assert (exported['model_type'], exported['num_hidden_layers']) == ('llama', 2)
  logits = paxlite.load(run).logits([1, 5, 7])
  run_import('hf', tmp_path / 'exported', tmp_path / 'again', f'--tokenizer={packaged.VOCAB}')
  np.testing.assert_allclose(
    paxlite.load(tmp_path / 'again').logits([1, 5, 7]), logits, rtol=1e-5, atol=1e-5
  )
  tuned_again = {'CHECKPOINT_RESTORE_PATH': run}
  if method == 'lora':
    with pytest.raises(UserError, match='and other weights: --method=lora trains them'):
      build_experiment('HuggingFaceSFT', [], tuned_again)
  else:
    e = build_experiment('HuggingFaceLoRA', [], tuned_again)
    assert (e.MODEL, e.NUM_LAYERS, e.USE_LORA) == ('LLaMA', 2, True)


@pytest.mark.slow
def test_a_signal_while_tasks_are_asked_before_the_first_step_leaves(weights, data, tmp_path):
  asked(tmp_path)
  task = json.loads((tmp_path / 'next.json').read_text())
  (tmp_path / 'TRAIN2.jsonl').write_text((tmp_path / 'TRAIN.jsonl').read_text() * 500)
  both = [task | {'name': 'short'}, task | {'name': 'long', 'files': 'TRAIN2.jsonl'}]
  (tmp_path / 'next.json').write_text(json.dumps(both))
  words = ['finetune', weights, *data, *SHORT, f"EVAL_TASKS=['{tmp_path}/next.json']"]
  command_line = [sys.executable, '-m', 'paxlite', *words, f'--folder={tmp_path / "run"}']
  process = runs.started(command_line, runs.environment())
  records, until = tmp_path / 'run' / 'eval_metrics.jsonl', time.monotonic() + 200
  while not (records.is_file() and '"short"' in records.read_text()):
    assert process.poll() is None
    assert time.monotonic() < until
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  assert process.wait(100) == 75
  assert '"long"' not in records.read_text()


def test_a_named_model_ends_its_answers_as_its_weights_do(weights):
  named = {'MODEL': 'LLaMA', 'CHECKPOINT_RESTORE_PATH': weights, 'TRAIN_FILES': 'a.jsonl'}
  assert build_experiment('HuggingFaceSFT', [], named).EOS_IDS == [2]
  assert build_experiment('HuggingFaceSFT', [], named | {'EOS_IDS': '[7]'}).EOS_IDS == [7]


def test_a_model_generates_as_its_weights_do(weights, tmp_path):
  folder = tmp_path / 'weights'
  shutil.copytree(weights, folder)
  path = folder / 'experiment.json'
  found = json.loads(path.read_text())
  stated = {'REPETITION_PENALTY': 1.3, 'GENERATION_CONFIG': {'top_k': 5}}
  path.write_text(json.dumps(found | {'values': found['values'] | stated}))
  for model in ({}, {'MODEL': 'LLaMA'}):
    given = {'CHECKPOINT_RESTORE_PATH': str(folder), 'TRAIN_FILES': 'a.jsonl', **model}
    e = build_experiment('HuggingFaceSFT', [], given)
    assert {name: getattr(e, name) for name in stated} == stated


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_of_a_former_name_goes_on(weights, data, tmp_path):
  """Earlier versions made a class of each model and method, whose name is in experiment.json."""
  words = [weights, *data, f'--folder={tmp_path / "run"}']
  words += SHORT
  command('finetune', *words)
  path = tmp_path / 'run' / 'experiment.json'
  found = json.loads(path.read_text())
  found['experiment'] = 'paxlite.experiments.finetuning.LLaMASFT'
  assert found['values'].pop('MODEL') == 'LLaMA'
  path.write_text(json.dumps(found))
  assert 'eval eval at step 4: loss ' in command('eval', str(tmp_path / 'run'))
  assert paxlite.load(tmp_path / 'run').experiment.MODEL == 'LLaMA'
  command('finetune', *words, 'MAX_STEPS=5')
  assert list(runs.losses(tmp_path / 'run')) == [1, 2, 3, 4, 5]
  assert json.loads(path.read_text())['values']['MODEL'] == 'LLaMA'


@pytest.mark.parametrize(
  ('words', 'config', 'attributes', 'folder'),
  [
    (
      ['weights/mine', 'LEARNING_RATE=1e-4'],
      'HuggingFaceSFT',
      {'CHECKPOINT_RESTORE_PATH': 'weights/mine', 'LEARNING_RATE': '1e-4'},
      'runs/mine-sft',
    ),
    (
      ['--method', 'lora', 'gs://bucket/mine/', '--folder', 'x', '--accept_changes'],
      'HuggingFaceLoRA',
      {'CHECKPOINT_RESTORE_PATH': 'gs://bucket/mine/'},
      'x',
    ),
    (
      ['Gemma2B', '--method=documents', '--dry_run'],
      'HuggingFaceDocuments',
      {'MODEL': 'Gemma2B'},
      None,
    ),
    (
      ['Gemma2B', '--fdl.CHECKPOINT_RESTORE_PATH=w', '--job_log_dir', 'x'],
      'HuggingFaceSFT',
      {'MODEL': 'Gemma2B', 'CHECKPOINT_RESTORE_PATH': 'w'},
      'x',
    ),
  ],
)
def test_the_words_after_finetune(words, config, attributes, folder):
  options = finetune.PARSER.parsed(words)
  assert (options.mode, options.fdl_config, options.job_log_dir) == ('train', config, folder)
  assert options.attributes == attributes
  assert options.accept_changes == ('--accept_changes' in words)


@pytest.mark.parametrize(
  ('words', 'match'),
  [
    ([], '^WEIGHTS is missing: see paxlite finetune --help'),
    (['a/b', 'c/d'], "^'c/d' is one name too many"),
    (
      ['a/b', '--method=lor'],
      '^--method=lor must be sft, lora, qlora, documents, distill, dpo, ipo, orpo, simpo, kto, '
      r'reward, grpo or opd\. Did you mean lora',
    ),
    (['a/b', 'CHECKPOINT_RESTORE_PATH=c'], '^a/b and CHECKPOINT_RESTORE_PATH both name weights'),
    (['LLaMA3_8B', 'MODEL=GPT5B', '--dry_run'], '^LLaMA3_8B and MODEL both name a model'),
    (['LLaMA3_8B'], '^LLaMA3_8B is not a folder.* set its weights: CHECKPOINT_RESTORE'),
  ],
)
def test_words_that_are_wrong(words, match):
  with pytest.raises(UserError, match=match):
    finetune.PARSER.parsed(words)


def test_a_model_by_its_name():
  e = build_experiment('HuggingFaceLoRA', [], {'MODEL': 'DeepSeekV2_Lite'})
  assert (e.USE_LORA, e.NUM_EXPERTS, e.LATENT_DIMS) == (True, 64, 512)
  same = class_of({'experiment': full_name(type(e)), 'values': e.values()})
  assert same is type(e)
  assert find('HuggingFaceLoRA')(MODEL='DeepSeekV2_Lite').values() == e.values()
  small = find('HuggingFaceLoRA')(MODEL='SmolLM135M')
  assert (small.MAX_SEQ_LEN, small.num_devices, small.LEARNING_RATE) == (512, 1, 1e-3)
  large = find('HuggingFaceLoRA')(MODEL='LLaMA70B')
  assert large.ICI_MESH_SHAPE == find('LLaMA70BLoRA')().ICI_MESH_SHAPE == [1, 8, 1]
  with pytest.raises(UserError, match='the model is a SmolLM135M and cannot'):
    small.replaced(MODEL='LLaMA3_8B')


class Mine(HuggingFaceLoRA):
  LORA_RANK = 4


class Wide(LLaMA):
  NUM_LAYERS = 2
  NUM_HEADS = 4
  MODEL_DIMS = 64
  HIDDEN_DIMS = 128


def test_classes_of_a_user(weights):
  e = build_experiment(full_name(Mine), [], {'CHECKPOINT_RESTORE_PATH': weights})
  assert (full_name(type(e)), e.MODEL, e.LORA_RANK) == (full_name(Mine), 'LLaMA', 4)
  assert class_of({'experiment': full_name(Mine), 'values': e.values()}) is type(e)
  e = build_experiment('HuggingFaceSFT', [], {'MODEL': full_name(Wide)})
  assert (e.MODEL_DIMS, e.LR_COS_WARMUP) == (64, 500)


def test_a_worker_of_the_planner_gets_the_same_experiment():
  e = build_experiment('HuggingFaceLoRA', [], {'MODEL': 'DeepSeekV2_Lite'})
  asked = json.loads(json.dumps(stated(e.replaced(PERCORE_BATCH_SIZE=4.0))))
  found = restored(full_name(type(e)), asked)
  assert type(found) is type(e)
  assert found.values() == e.values() | {'PERCORE_BATCH_SIZE': 4.0}


@pytest.mark.parametrize(
  ('model', 'match'),
  [
    ('smollm-135m', r'^MODEL=smollm-135m: no model has this name\. Did you mean SmolLM135M'),
    ('GPT2', '^MODEL=GPT2 is a model that HuggingFaceSFT does not fine-tune'),
    ('SyntheticLLaMA7B', 'has a dataset: name the model alone, MODEL=LLaMA7B'),
  ],
)
def test_a_model_that_cannot_be_tuned(model, match):
  with pytest.raises(UserError, match=match):
    build_experiment('HuggingFaceSFT', [], {'MODEL': model})


def test_a_model_in_a_file_imports_no_module(tmp_path, monkeypatch):
  (tmp_path / 'model_that_runs.py').write_text('raise SystemExit("code of a checkpoint ran")')
  monkeypatch.syspath_prepend(tmp_path)
  found = {'experiment': 'paxlite.experiments.finetuning.HuggingFaceSFT'}
  with pytest.raises(UserError, match='paxlite does not import modules for checkpoints:'):
    class_of({**found, 'values': {'MODEL': 'model_that_runs.Model'}})


@pytest.mark.parametrize('name', ['LLaMA3_8BSFT', 'paxlite.experiments.finetuning.LLaMA3_8BSFT'])
def test_a_former_name_gets_the_command(name):
  with pytest.raises(UserError, match='paxlite finetune LLaMA3_8B --method=sft CHECKPOINT_RESTORE'):
    find(name)
