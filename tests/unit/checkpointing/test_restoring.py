"""Runs that start from other checkpoints: rules, stacked and unrolled layers, LoRA, Pax's state."""

import json
import pathlib
import re

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.checkpointing.restore import _find
from paxlite.checkpointing.source import find_source, tokenizer_of
from paxlite.checkpointing.variables import Variable, write_variable
from paxlite.core.errors import UserError
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.finetuning import SFT
from paxlite.experiments.llama import LLaMA
from paxlite.programs.run import Run
from tests.support import runs
from tests.support.imported import flat, run_import

SMALL = dict(
  NUM_LAYERS=3, NUM_HEADS=4, NUM_KV_HEADS=2, MODEL_DIMS=16, HIDDEN_DIMS=24, VOCAB_SIZE=64,
  MAX_SEQ_LEN=16, FPROP_DTYPE='float32', PERCORE_BATCH_SIZE=2, MAX_STEPS=2, LEARNING_RATE=1e-3,
  LR_SCHEDULE='constant', SUMMARY_INTERVAL_STEPS=1, EVAL_INTERVAL_STEPS=100, PACKED_INPUT=False,
)  # fmt: skip


class SmallLlama(Synthetic, LLaMA):
  """A LLaMA with a few thousand weights."""


def trainer(folder, start_over=False, **changes):
  experiment = SmallLlama(**(SMALL | changes))
  experiment.validate()
  return Run(experiment, folder, start_over=start_over).trainer()


def train(folder, **changes):
  """Trains and returns the state; other runs can then restore from the folder."""
  experiment = SmallLlama(**(SMALL | changes))
  from paxlite.programs.training import train as program

  program(Run(experiment, folder))
  return trainer(folder, **changes).store.initial()[0]


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  folder = tmp_path_factory.mktemp('base')
  return folder, flat(train(folder).params)


def restored(tmp_path, base, **changes):
  return trainer(tmp_path / 'new', CHECKPOINT_RESTORE_PATH=str(base[0]), **changes).store


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parameters_alone(base, tmp_path):
  state, step = restored(tmp_path, base).initial()
  assert step == 0
  assert int(state.opt_state[1].count) == 0
  for name, value in flat(state.params).items():
    np.testing.assert_array_equal(value, base[1][name])


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_starts_where_it_started(base, tmp_path):
  source = dict(CHECKPOINT_RESTORE_PATH=str(base[0]))
  train(tmp_path, **source)
  for checksums in tmp_path.glob('checkpoints/checkpoint_*/checksums.json'):
    checksums.unlink()
  with pytest.raises(UserError, match=r'no good checkpoint: checkpoint_00000002\. .*--start_over'):
    trainer(tmp_path, **source).store.initial()
  # This run looks for the other checkpoint, but does not need it yet.
  states = trainer(tmp_path, start_over=True, **source).store
  state, step = states.initial()
  assert step == 0
  assert states.plan is not None
  for name, value in flat(state.params).items():
    np.testing.assert_array_equal(value, base[1][name])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_repeated_into_unrolled_and_back(base, tmp_path):
  state, _ = restored(tmp_path, base, USE_REPEATED_LAYER=False).initial()
  for name, value in flat(state.params).items():
    layer, rest = [*name.split('/', 2)[1:], '', ''][:2]
    if layer.startswith('x_layers_'):
      stack = base[1][f'transformer/repeat/{rest}']
      np.testing.assert_array_equal(value, stack[int(layer.removeprefix('x_layers_'))])
  unrolled = (tmp_path / 'unrolled', None)
  train(unrolled[0], USE_REPEATED_LAYER=False, CHECKPOINT_RESTORE_PATH=str(base[0]), MAX_STEPS=1)
  expected = flat(
    trainer(unrolled[0], USE_REPEATED_LAYER=False, MAX_STEPS=1).store.initial()[0].params
  )
  back = flat(restored(tmp_path / 'b', unrolled).initial()[0].params)
  for name, value in back.items():
    if '/repeat/' in name:
      rest = name.split('/repeat/')[1]
      layers = [expected[f'transformer/x_layers_{i}/{rest}'] for i in range(3)]
      np.testing.assert_array_equal(value, np.stack(layers))
    else:
      np.testing.assert_array_equal(value, expected[name])


def test_a_layer_of_several_blocks_is_taken_from_its_stack():
  values = np.arange(6.0).reshape(2, 3)
  stack = Variable((2, 3), values.dtype, lambda index: values[index])
  stored, used = {'transformer/repeat/x_layers_1/w': stack}, set()
  for i in range(2):
    found = _find(stored, f'transformer/x_layers_{i}/x_layers_1/w', (3,), used)
    np.testing.assert_array_equal(found.whole(), values[i])
  assert used == set(stored)


@pytest.mark.slow
def test_ignored_and_renamed(base, tmp_path):
  with pytest.raises(UserError, match='ff_layer_norm/scale is not in the model'):
    restored(
      tmp_path, base, SEPARATE_EMBEDDING=False, CHECKPOINT_IGNORE_RULES=['softmax/.*'],
      CHECKPOINT_RENAME_RULES=[r'transformer/(.*)/ff_(layer_norm/scale)=>transformer/\1/\2'],
    )  # fmt: skip
  states = restored(
    tmp_path, base, CHECKPOINT_IGNORE_RULES=[r'.*/ff_layer_norm/scale', r'.*/ffn_layer2/w'],
    CHECKPOINT_RENAME_RULES=[r'softmax/(\w)=>softmax/\1'],
  )  # fmt: skip
  params = flat(states.initial()[0].params)
  ignored = {n for n in params if n.endswith(('ffn_layer2/w', 'ff_layer_norm/scale'))}
  for name, value in params.items():
    assert np.array_equal(value, base[1][name]) == (name not in ignored), name
  table = states.plan.table()
  assert 'params/transformer/repeat/ff_layer/ffn_layer2/w' in table.split('ignored')[1]


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(CHECKPOINT_IGNORE_RULES=['nothing']), "CHECKPOINT_IGNORE_RULES: 'nothing' matches no"),
    (dict(CHECKPOINT_RENAME_RULES=['a=>b']), "CHECKPOINT_RENAME_RULES: 'a=>b' matches no"),
    (dict(CHECKPOINT_RENAME_RULES=['a']), 'must be pattern=>replacement'),
    (dict(CHECKPOINT_IGNORE_RULES=['(']), 'is not a regular expression'),
    (dict(CHECKPOINT_RENAME_RULES=[r'(softmax)/w=>\5']), 'invalid group reference 5'),
    (
      dict(CHECKPOINT_RESTORE_CHANGES=['X']),
      "CHECKPOINT_RESTORE_CHANGES: 'X' is not one of USE_ROTA",
    ),
    (dict(VOCAB_SIZE=128), 'The checkpoint is of a model with VOCAB_SIZE=64'),
    (
      dict(ROPE_THETA=5e5, ACTIVATION_CLS='gelu'),
      r'has ROPE_THETA=10000.0 ACTIVATION_CLS=silu and this run ROPE_THETA=5',
    ),
    (
      dict(ROPE_THETA=5e5, ACTIVATION_CLS='gelu', CHECKPOINT_RESTORE_CHANGES=['ROPE_THETA']),
      r'has ACTIVATION_CLS=silu and this run ACTIVATION_CLS=gelu',
    ),
    (dict(HIDDEN_DIMS=32), r'ffn_layer1/w is \[3, 16, 24\] and the model has \[3, 16, 32\]'),
    (dict(SEPARATE_EMBEDDING=False), 'params/softmax/w is not in the model'),
    (dict(NUM_LAYERS=2, USE_REPEATED_LAYER=False), 'is not in the model'),
    (dict(NUM_LAYERS=4, USE_REPEATED_LAYER=False), 'x_layers_3/.* is missing'),
    (dict(NORM_CLS='LayerNorm', NORM_SCALE_OFFSET=0.0), 'params/final_ln/bias is missing'),
  ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(changes, match, base, tmp_path):
  with pytest.raises(UserError, match=match):
    restored(tmp_path, base, **changes)
  assert not (tmp_path / 'new').exists()


def test_a_change_of_the_function_that_is_meant(base, tmp_path):
  changes = dict(ROPE_THETA=5e5, CHECKPOINT_RESTORE_CHANGES=['ROPE_THETA'])
  params = flat(restored(tmp_path, base, **changes).initial()[0].params)
  assert all(np.array_equal(value, base[1][name]) for name, value in params.items())


def test_rules_without_a_checkpoint():
  with pytest.raises(UserError, match='CHECKPOINT_IGNORE_RULES needs'):
    SmallLlama(**SMALL, CHECKPOINT_IGNORE_RULES=['.*']).validate()


def test_a_damaged_checkpoint_is_refused(base, tmp_path):
  import shutil

  copy = tmp_path / 'copy'
  shutil.copytree(base[0], copy)
  (step,) = (copy / 'checkpoints').iterdir()
  file = step / 'state' / 'params.softmax.w' / '0.0'
  data = bytearray(file.read_bytes())
  data[5] ^= 1
  file.write_bytes(data)
  with pytest.raises(UserError, match='is damaged'):
    restored(tmp_path, (copy, None))
  with pytest.raises(UserError, match='is damaged'):
    restored(tmp_path, (step, None))


LORA = dict(USE_LORA=True, LORA_RANK=2)


@pytest.mark.slow
def test_lora_trains_its_factors_alone(base, tmp_path):
  """The base does not change; the optimizer state and the checkpoint hold only LoRA's variables."""
  states = restored(tmp_path, base, **LORA)
  fresh = set(states.plan.fresh)
  assert fresh
  assert all(n.endswith(('lora_a', 'lora_b')) for n in fresh)
  changes = LORA | dict(CHECKPOINT_RESTORE_PATH=str(base[0]))
  state = train(tmp_path / 'lora', **changes)
  params = flat(state.params)
  lora = {n: v for n, v in params.items() if 'lora_' in n}
  for name, value in params.items():
    if name not in lora:
      np.testing.assert_array_equal(value, base[1][name])
  assert all(v.any() for n, v in lora.items() if n.endswith('lora_b'))
  moments = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim)
  assert moments == 2 * sum(v.nbytes for v in lora.values())
  saved = next((tmp_path / 'lora' / 'checkpoints').iterdir()) / 'state'
  stored = {p.name for p in saved.iterdir() if p.name.startswith('params.')}
  assert stored == {f'params.{n.replace("/", ".")}' for n in lora}


@pytest.mark.slow
def test_lora_goes_on_only_beside_the_same_weights(base, tmp_path):
  changes = LORA | dict(CHECKPOINT_RESTORE_PATH=str(base[0]))
  two = flat(train(tmp_path / 'two', **changes).params)
  train(tmp_path / 'one', **changes, MAX_STEPS=1)
  resumed = flat(train(tmp_path / 'one', **changes).params)
  for name, value in two.items():
    np.testing.assert_array_equal(value, resumed[name])
  other = tmp_path / 'other'
  train(other, SEED=5)
  with pytest.raises(UserError, match='not hold the frozen weights that this run began with'):
    trainer(tmp_path / 'one', **(changes | dict(CHECKPOINT_RESTORE_PATH=str(other)))
    ).store.initial()  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_continues_when_its_base_continued_or_moved(tmp_path, monkeypatch):
  """The path is relative, and the frozen checkpoint is found among all checkpoints of the base."""
  from paxlite.weights.commands import export_weights

  monkeypatch.chdir(tmp_path)
  train(tmp_path / 'base')
  train(tmp_path / 'lora', **LORA, CHECKPOINT_RESTORE_PATH='base')
  before = find_source('lora').unrolled_params()
  before = {name: variable.whole() for name, variable in before.items()}
  train(tmp_path / 'base', MAX_STEPS=3)
  train(tmp_path / 'lora', **LORA, CHECKPOINT_RESTORE_PATH='base', MAX_STEPS=3)
  _, step = trainer(
    tmp_path / 'lora', **LORA, CHECKPOINT_RESTORE_PATH='base', MAX_STEPS=3
  ).store.initial()
  assert step == 3
  monkeypatch.chdir('/')
  after = find_source(tmp_path / 'lora').unrolled_params()
  for name, value in before.items():
    assert np.array_equal(after[name].whole(), value) == ('/lora_' not in name), name

  (tmp_path / 'base').rename(tmp_path / 'moved')
  export = ['--to=hf', f'--checkpoint={tmp_path / "lora"}', f'--path={tmp_path / "hf"}']
  with pytest.raises(
    UserError, match=r'base is not a folder.* If they were moved: --base_weights='
  ):
    export_weights.main(export)
  export_weights.main([*export, f'--base_weights={tmp_path / "moved"}'])


def test_state_of_weights_that_have_none(base, tmp_path):
  import shutil

  weights = tmp_path / 'weights'
  (step,) = (base[0] / 'checkpoints').iterdir()
  for path in (step / 'state').glob('params.*'):
    shutil.copytree(path, weights / 'state' / path.name)
  write_checksums(weights)
  with pytest.raises(UserError, match='holds weights alone, no optimizer state'):
    restored(tmp_path, (weights, None), CHECKPOINT_RESTORE_STATE=True)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('target', ['all', 'attention', 'mlp'])
@pytest.mark.parametrize(
  'shape', [{}, dict(DIMS_PER_HEAD=8, HEADS_SPAN_MODEL=False), dict(USE_DORA=True)]
)
def test_lora_is_a_sum_of_weights(target, shape, base, tmp_path):
  """For grouped queries and heads that do not span the model, the result equals W + A·Bᵀ."""
  from paxlite.checkpointing.variables import Variable
  from paxlite.weights.lora import merged

  experiment = SmallLlama(
    **(SMALL | LORA | shape), LORA_TARGET_LAYERS=target, USE_REPEATED_LAYER=False
  )
  plain = SmallLlama(**(SMALL | shape), USE_REPEATED_LAYER=False)
  model, plain_model = fdl.build(experiment.build_task()).model, fdl.build(plain.build_task()).model
  from flax import traverse_util
  from flax.linen import meta

  params = meta.unbox(jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32)))['params']
  rng = np.random.default_rng(0)
  noisy = jax.tree.map(lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape), params)
  variables = {
    n: Variable(v.shape, np.dtype('float32'), lambda i, v=v: v.astype(np.float32)[i])
    for n, v in flat(noisy).items()
  }
  kinds = {n.split('/')[2] for n in variables if 'lora_a' in n}
  wanted = {'all': {'self_attention', 'ff_layer'}, 'attention': {'self_attention'}}
  assert kinds == wanted.get(target, {'ff_layer'})
  together = {n: v.whole() for n, v in merged(experiment, variables).items()}
  ids = rng.integers(0, 64, (2, 9))
  with jax.default_matmul_precision('highest'):
    expected = jax.jit(model.apply)({'params': noisy}, ids)
    unflat = traverse_util.unflatten_dict(together, sep='/')
    logits = jax.jit(plain_model.apply)({'params': unflat}, ids)
  np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('case', [
  ('llama_gqa_tied', {}), ('llama_gqa_tied', dict(USE_DORA=True)),
])  # fmt: skip
def test_peft_loads_the_adapter_and_agrees(case, tmp_path):
  import torch
  import transformers
  from peft import PeftModel

  from paxlite.generation.inference import experiment_of
  from paxlite.weights.commands import export_weights
  from tests.parity.test_weights import their_model

  name, values_of_lora = case
  theirs = their_model(name)
  theirs.save_pretrained(tmp_path / 'hf')
  run_import('hf', tmp_path / 'hf', tmp_path / 'w')
  values = experiment_of(find_source(tmp_path / 'w')).values()
  sizes = {k: values[k] for k in (
    'NUM_LAYERS', 'NUM_HEADS', 'NUM_KV_HEADS', 'MODEL_DIMS', 'HIDDEN_DIMS', 'VOCAB_SIZE',
    'LAYERNORM_EPSILON', 'SEPARATE_EMBEDDING', 'FPROP_DTYPE', 'ROPE_THETA')}  # fmt: skip
  changes = sizes | dict(LEARNING_RATE=0.05, CHECKPOINT_RESTORE_PATH=str(tmp_path / 'w'))
  train(tmp_path / 'lora', **changes, **LORA, **values_of_lora)
  for to in ('peft', 'hf'):
    export_weights.main(
      [f'--to={to}', f'--checkpoint={tmp_path / "lora"}', f'--path={tmp_path / to}_out']
    )
  merged = transformers.AutoModelForCausalLM.from_pretrained(f'{tmp_path / "hf"}_out')
  adapted = PeftModel.from_pretrained(theirs, f'{tmp_path / "peft"}_out')
  ids = torch.arange(3, 20)[None]
  with torch.no_grad():
    a, b = merged(ids).logits, adapted(ids).logits
    adapted.disable_adapter_layers()
    plain = adapted(ids).logits
  torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
  assert (a - plain).abs().max() > 1e-2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_table_is_printed_and_the_start_is_the_others_end(base, tmp_path):
  """The run goes through main, on 8 devices."""
  flags = [f'--fdl.{k}={v}' for k, v in SMALL.items()]
  result = runs.run(
    tmp_path / 'run', *flags, f'--fdl.CHECKPOINT_RESTORE_PATH={base[0]}',
    '--fdl.ICI_MESH_SHAPE=[1,4,2]', '--fdl.PERCORE_BATCH_SIZE=0.5',
    config='tests.unit.checkpointing.test_restoring.SmallLlama', devices=8,
  )  # fmt: skip
  assert f'Restored from {base[0]}' in result.stdout
  assert 'restored     12' in result.stdout
  written = json.loads((tmp_path / 'run' / 'experiment.json').read_text())
  assert written['values']['CHECKPOINT_RESTORE_PATH'] == str(base[0])


def of_lora(folder, **values):
  """Returns a folder with LoRA's variables and an identity with these values."""
  write_variable(folder / 'state', 'params.x.lora_a', np.zeros(2, np.float32))
  (folder / 'data').mkdir()
  (folder / 'data' / 'metadata').write_text('{}')
  identity = {'experiment': 'LLaMA', 'values': values}
  (folder / 'experiment.json').write_text(json.dumps(identity))
  write_checksums(folder)
  return folder


@pytest.mark.parametrize('around', [['a'], ['a', 'b'], ['a', 'b', 'c']])
def test_checkpoints_that_name_each_other(tmp_path, around):
  for name, other in zip(around, [*around[1:], around[0]], strict=True):
    (tmp_path / name).mkdir()
    of_lora(tmp_path / name, CHECKPOINT_RESTORE_PATH=str(tmp_path / other))
  with pytest.raises(UserError, match='CHECKPOINT_RESTORE_PATH is a circle'):
    tokenizer_of(tmp_path / 'a')
  with pytest.raises(UserError, match='CHECKPOINT_RESTORE_PATH is a circle'):
    print(find_source(tmp_path / 'a').variables)


@pytest.mark.parametrize('name', ['VOCAB_PATH', 'CHECKPOINT_RESTORE_PATH'])
@pytest.mark.parametrize('value', [5, ['x'], 'x' * 5000, 'a\0b', {'a': 1}])
def test_paths_of_a_checkpoint_that_are_none(tmp_path, name, value):
  of_lora(tmp_path, **{name: value})
  message = rf'experiment\.json is damaged: its {name} is not a path'
  with pytest.raises(UserError, match=message):
    tokenizer_of(tmp_path)
  with pytest.raises(UserError, match=message):
    print(find_source(tmp_path).variables)


@pytest.mark.parametrize('path', ['x' * 5000, 'a\0b', '/' + 'x/' * 5000])
def test_what_cannot_be_a_path_is_no_folder(path):
  assert tokenizer_of(path) is None
  with pytest.raises(UserError, match='is not a folder'):
    find_source(path)


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    ([], 'holds no weights: neither checkpoints/ of a run nor state/ of imported ones$'),
    (['config.json', 'model.safetensors'], '--from=hf --path={} --to=weights/of-others'),
    (['model-Q8_0.gguf'], 'GGUF, which paxlite does not import. .*from_pretrained.{}'),
    (['params.json', 'consolidated.00.pth'], '--from=meta --path={}'),
    (['notes.txt'], 'Weights of other formats are read by paxlite import'),
  ],
)
def test_weights_that_were_not_imported_are_recognized(tmp_path, files, message):
  folder = tmp_path / 'of others'
  folder.mkdir()
  for name in files:
    (folder / name).touch()
  for act in (find_source, lambda path: sft(path)):
    with pytest.raises(UserError, match=message.format(f"'{re.escape(str(folder))}'")):
      act(str(folder))


def test_a_model_of_another_size_is_said_before_its_tokenizer(base, tmp_path):
  """The data is not read before that either, because reading takes time."""
  with pytest.raises(UserError, match=r'does not fit the model: .* of a model with NUM_LAY'):
    sft(str(base[0]), TRAIN_FILES=['gone.jsonl'], VOCAB_PATH='gone.model')


def sft(path: str, **changes):
  """Returns a fine-tuning run whose model differs from that of `base`."""
  e = SmallSft(TRAIN_FILES=['x.jsonl'], CHECKPOINT_RESTORE_PATH=path)
  for name, value in changes.items():
    setattr(e, name, value)
  return Run(e, pathlib.Path('never_made')).trainer()


class SmallSft(SFT, LLaMA):
  """A fine-tuning experiment on one device."""

  NUM_LAYERS = 2
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  VOCAB_SIZE = 512
  MAX_SEQ_LEN = 16
  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
