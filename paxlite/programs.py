"""What `paxlite.main` does with an experiment: train, evaluate, decode, or a dry run."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax
from flax.linen import meta

from paxlite import partitioning
from paxlite.checkpoints import Checkpoints
from paxlite.compiled_step import SavedStep
from paxlite.errors import UserError
from paxlite.evaluation import Evaluator
from paxlite.experiment import Experiment
from paxlite.experiments.backend import PLAIN_XLA
from paxlite.inputs.base import Input
from paxlite.inputs.files import read_object
from paxlite.inputs.tokenizer import Tokenizer, open_tokenizer
from paxlite.optimizers import path_name
from paxlite.params import derived
from paxlite.restoring import Restore, find_source, tokenizer_of
from paxlite.states import States
from paxlite.summaries import Summaries, versions
from paxlite.templates import config_text
from paxlite.trainer import Trainer

if TYPE_CHECKING:
  from paxlite.inference import Inference

_VALUES = 'experiment.json'


@dataclasses.dataclass(frozen=True)
class Run:
  """An experiment and where it runs.

  Attributes:
    experiment: Validated numbers.
    folder: job_log_dir.
    save: Whether training writes checkpoints; it continues from those that are there either way.
    accept_changes: Whether a folder of a different experiment may be continued.
    read_only: Whether what the folder holds stays as it is.
    compiled_step: A file of tools.compile to load instead of compiling.
  """

  experiment: Experiment
  folder: pathlib.Path
  save: bool = True
  accept_changes: bool = False
  read_only: bool = False
  compiled_step: pathlib.Path | None = None

  def trainer(self) -> Trainer:
    """Builds everything; raises UserError before a file is written or a program compiled."""
    e = self.experiment
    inputs = e.train_input(), e.eval_inputs()  # configs only, but a missing dataset is said first
    mesh = e.mesh()
    data = fdl.build(inputs[0])
    eval_data = {name: fdl.build(cfg) for name, cfg in inputs[1].items()}
    _check_vocabulary(e, {'training': data, **eval_data})
    _check_eval_batches(e, eval_data)
    states = self.states(mesh, data.batch_size)
    states.plan  # noqa: B018 - raises where another checkpoint does not fit
    options = e.compiler_options(mesh.devices.flat[0].platform)
    step = self.compiled_step
    saved = None if step is None else SavedStep(step, e.values(), options)
    if saved is not None:
      saved.check(mesh)
    trainer = Trainer(
      task=states.task,
      mesh=mesh,
      rules=e.rules,
      states=states,
      data=data,
      eval_data=eval_data,
      save=self.save,
      folder=self.folder,
      seed=e.SEED,
      seq_len=e.MAX_SEQ_LEN,
      max_steps=e.MAX_STEPS,
      summary_interval=e.SUMMARY_INTERVAL_STEPS,
      eval_interval=e.EVAL_INTERVAL_STEPS,
      save_interval=e.CHECKPOINT_EVERY_N_STEPS,
      flops_per_token=e.flops_per_token,
      profiler_step=e.PROFILER_CAPTURE_STEP,
      profiler_steps=e.PROFILER_NUM_STEPS,
      compiler_options=options,
      saved_step=saved,
    )
    _check_trainable(trainer)
    return trainer

  def states(self, mesh: Any, batch_size: int) -> States:
    e = self.experiment
    return States(
      task=fdl.build(e.training_task()),
      mesh=mesh,
      rules=e.rules,
      checkpoints=self.checkpoints(),
      seed=e.SEED,
      batch_size=batch_size,
      restore=e.restore,
      trainable_only=e.saves_trainable_only,
    )

  def checkpoints(self) -> Checkpoints:
    keep = self.experiment.CHECKPOINT_MAX_TO_KEEP
    return Checkpoints(self.folder / 'checkpoints', keep, read_only=self.read_only)

  def tokenizer(self) -> Tokenizer | None:
    """What a sample at the end of training needs; None where none is asked for."""
    if getattr(self.experiment, 'SAMPLE_PROMPT', None) is None:
      return None
    vocab = getattr(self.experiment, 'VOCAB_PATH', '')
    return open_tokenizer(vocab or str(tokenizer_of(self.experiment.CHECKPOINT_RESTORE_PATH) or ''))


def train(run: Run) -> None:
  """Trains to MAX_STEPS, continuing what the folder holds, and prints a sample."""
  refuse_other_experiment(run)
  tokenizer = run.tokenizer()
  trainer = run.trainer()
  make_folder(run.folder)
  if jax.process_index() == 0:
    print(f'Backend: {run.experiment.backend}', flush=True)
  state, step = trainer.states.initial()
  if trainer.states.plan is not None and jax.process_index() == 0:
    print(trainer.states.plan.table(), flush=True)
  write_configuration(run)  # not before it is known that the folder's checkpoint fits
  state = trainer.train(state, step)
  e: Any = run.experiment
  if tokenizer is not None and getattr(e, 'USE_TE', 'off') == 'layer':
    print("No sample: Transformer Engine's layers keep no keys and values")
  elif tokenizer is not None and jax.process_count() == 1:
    text = _sample(e, trainer, state.params, tokenizer)
    print(f'\nA sample, continuing {e.SAMPLE_PROMPT!r}:\n{text}\n')
  if jax.process_index() == 0:
    print(f'Logs, metrics and checkpoints are in {run.folder}', flush=True)


def evaluate(run: Run) -> None:
  """Evaluates the last good checkpoint on every evaluation input, and on EVAL_TASKS."""
  run = dataclasses.replace(run, read_only=True)
  e = run.experiment
  if not run.checkpoints().steps() and e.restore is None:
    raise UserError(
      f'{run.folder} holds no checkpoint to evaluate: train first, or name weights '
      'with --fdl.CHECKPOINT_RESTORE_PATH'
    )
  tasks = getattr(e, 'EVAL_TASKS', [])
  make_folder(run.folder)
  if tasks:
    _refuse_other_model(run)
    evaluate_zero_shot(run, tasks)
    if not e.eval_inputs():
      return
  refuse_other_experiment(run)
  trainer = run.trainer()
  print(f'Backend: {e.backend}', flush=True)
  if not trainer.eval_data:
    raise UserError(f'{type(run.experiment).__name__} has no evaluation input')
  state, step = trainer.states.last()
  summaries = Summaries(run.folder, max_steps=step)
  try:
    evaluator = Evaluator(trainer.task, trainer.mesh, trainer.rules, trainer.eval_data)
    evaluator.report(state, step, summaries)
  finally:
    summaries.close()


def evaluate_zero_shot(run: Run, names: Sequence[str]) -> None:
  """Evaluates on the tasks of these names; prints tables and writes summaries."""
  from paxlite import eval_tasks, zero_shot

  e: Any = run.experiment
  tasks = eval_tasks.read_tasks(
    names,
    skip_unreadable=e.EVAL_SKIP_UNREADABLE,
    tfds_data_dir=getattr(e, 'TFDS_DATA_DIR', ''),
  )
  inference, step = load(run)
  evaluate = zero_shot.ZeroShot(inference, e.EVAL_BATCH_TOKENS, e.EVAL_TOO_LONG)
  summaries = Summaries(run.folder, max_steps=step or 0)
  try:
    for task in tasks:
      result = evaluate(task)
      values = {k: m.value for k, m in result.metrics.items()}
      values |= {f'{k}_stderr': m.stderr for k, m in result.metrics.items()}
      summaries.result(step or 0, task.name, values, result.line())
  finally:
    summaries.close()


def load(run: Run) -> tuple['Inference', int | None]:
  """The model with the last good checkpoint, and its step; or with restored weights, and None."""
  from paxlite import inference

  e: Any = run.experiment
  own = bool(run.checkpoints().steps())
  restore = Restore(str(run.folder)) if own else e.restore
  if restore is None:
    raise UserError(
      f'{run.folder} holds no checkpoint: train first, or name weights '
      'with --fdl.CHECKPOINT_RESTORE_PATH'
    )
  source = find_source(restore.path)
  vocab = getattr(e, 'VOCAB_PATH', '') or os.environ.get('VOCAB_PATH', '')
  loaded = inference.load(e, source, restore, vocab)
  return loaded, int(source.folder.name.rpartition('_')[2]) if own else None


def decode(run: Run) -> None:
  """Continues the prompts of DECODE_FILES with the last good checkpoint, or restored weights."""
  from paxlite import inference

  e: Any = run.experiment
  if not e.DECODE_FILES:
    raise UserError('--fdl.DECODE_FILES="[\'/path/to/prompts.jsonl\']" is missing')
  refuse_other_experiment(run)
  loaded, step = load(run)
  prompts = inference.read_prompts(e.DECODE_FILES, loaded)
  make_folder(run.folder)
  name = 'restored' if step is None else f'{step:08d}'
  output = run.folder / f'decoded_{name}.jsonl'
  count = inference.decode_file(loaded, prompts, output)
  print(f'{output}: {len(prompts):,} prompts continued, {count:,} of them now', flush=True)


def dry_run(experiment: Experiment) -> str:
  """The experiment's values, its built configs, and what it needs; reads and writes no file."""
  return '\n'.join(
    [values_text(experiment), configs_text(experiment), '', requirements(experiment)]
  )


def configs(experiment: Experiment) -> dict[str, fdl.Config]:
  """The configs of the task and of the inputs, by name; no inputs where there is no dataset."""
  found = {'task': experiment.training_task()}
  with contextlib.suppress(UserError):
    found['train_input'] = experiment.train_input()
    found |= {f'eval_inputs.{name}': cfg for name, cfg in experiment.eval_inputs().items()}
  return found


def configs_text(experiment: Experiment) -> str:
  return '\n'.join(config_text(cfg, name) for name, cfg in configs(experiment).items())


def requirements(experiment: Experiment) -> str:
  """Parameters, bytes per device, tokens and FLOPs of a step."""
  e = experiment
  task = fdl.build(e.training_task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  specs = partitioning.param_specs(boxed, e.rules)
  state = meta.unbox(boxed)
  trainable, _ = task.optimizer.split(state.params)
  trainable_specs, _ = task.optimizer.split(specs.params)
  sizes = e.mesh_sizes
  count = sum(x.size for x in jax.tree.leaves(state.params))
  trained = sum(x.size for x in jax.tree.leaves(trainable))
  per_device = lambda tree, tree_specs: f'{_bytes_per_device(tree, tree_specs, sizes):,} bytes'
  tokens = e.batch_size * e.MAX_SEQ_LEN
  lines = [
    f'parameters {count:,}',
    f'trainable parameters {trained:,}',
    f'mesh {sizes}: {e.num_devices:,} devices, {jax.device_count():,} present',
    f'per device: parameters {per_device(state.params, specs.params)}',
    f'per device: optimizer {per_device(state.opt_state, specs.opt_state)}',
    f'per device: gradients {per_device(trainable, trainable_specs)}',
    f'global batch {e.batch_size:,} × {e.MAX_SEQ_LEN:,} = {tokens:,} tokens per step',
    f'model FLOPs per step {e.flops_per_token * tokens:.4g} (attention counted causally)',
  ]
  return '\n'.join(lines)


def values_text(experiment: Experiment) -> str:
  """One `NAME = value` a line."""
  name = f'{type(experiment).__module__}.{type(experiment).__qualname__}'
  return '\n'.join(
    [
      f'# {name}',
      f'# backend {experiment.backend}',
      *(f'{k} = {v!r}' for k, v in experiment.values().items()),
      '',
    ]
  )


def write_configuration(run: Run) -> None:
  """Writes what the run is into its folder: values, built config, versions."""
  if jax.process_index() != 0:
    return
  from fiddle.experimental import serialization

  e, folder = run.experiment, run.folder
  built = {name: json.loads(serialization.dump_json(cfg)) for name, cfg in configs(e).items()}
  for name, text in {
    _VALUES: json.dumps(_identity(e), indent=2),
    'experiment.txt': values_text(e),
    'config.txt': configs_text(e),
    'config.json': json.dumps(built, indent=1),
    'versions.json': json.dumps(versions(), indent=2),
  }.items():
    unfinished = folder / f'{name}.tmp'
    unfinished.write_text(text.rstrip('\n') + '\n')
    unfinished.replace(folder / name)  # a kill leaves the old file or the new one


def make_folder(folder: pathlib.Path) -> None:
  """Makes job_log_dir; raises UserError where it cannot be made or written."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / '.writable').touch()
    (folder / '.writable').unlink()
  except OSError as e:
    raise UserError(f'--job_log_dir={folder} cannot be written: {e.strerror or e}') from None


def refuse_other_experiment(run: Run) -> None:
  """Raises UserError when the folder's checkpoints are those of a different experiment."""
  path = run.folder / _VALUES
  if run.accept_changes or not path.exists() or not run.checkpoints().steps():
    return
  try:
    before = json.loads(path.read_text())
    old = {'experiment': before['experiment'], **before['values']}
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path} is damaged ({e!r}); --accept_changes goes on without it') from None
  identity = _identity(run.experiment)
  new = {'experiment': identity['experiment'], **identity['values']}
  for name in new.keys() - old.keys():  # an attribute that is newer than the run
    default = PLAIN_XLA.get(name, getattr(type(run.experiment), name))
    old[name] = new[name] if isinstance(default, derived) else default
  free = set(run.experiment.RESUMABLE_CHANGES)
  missing = object()
  changed = [
    f'{name} {old.get(name, "unset")!r} → {new.get(name, "unset")!r}'
    for name in sorted(old.keys() | new.keys())
    if name not in free and old.get(name, missing) != new.get(name, missing)
  ]
  if changed:
    raise UserError(
      f'{run.folder} holds checkpoints of a different experiment: {"; ".join(changed)}. '
      'Choose another --job_log_dir, or continue with the change: --accept_changes'
    )


def _refuse_other_model(run: Run) -> None:
  """Raises UserError when the folder's checkpoints are of a model that is another by its numbers.

  Zero-shot tasks have experiments of their own (Lambada126M), which evaluate another's run.
  """
  path = run.folder / _VALUES
  if not path.exists() or not run.checkpoints().steps():
    return
  before = read_object(path).get('values', {})
  ours = {k: v for values in run.experiment.model_values for k, v in values.items()}
  changed = [
    f'{k} {before[k]!r} → {v!r}' for k, v in ours.items() if k in before and before[k] != v
  ]
  if changed:
    raise UserError(f'{run.folder} holds checkpoints of another model: {"; ".join(changed)}')


def _identity(e: Experiment) -> dict[str, Any]:
  cls = type(e)
  values = e.values()
  if e.CHECKPOINT_RESTORE_PATH:  # LoRA's base is looked for there, from wherever
    values['CHECKPOINT_RESTORE_PATH'] = str(pathlib.Path(e.CHECKPOINT_RESTORE_PATH).absolute())
  name = f'{cls.__module__}.{cls.__qualname__}'
  return {'experiment': name, 'backend': str(e.backend), 'values': values}


def _sample(e: Any, trainer: Trainer, params: Any, tokenizer: Tokenizer) -> str:
  """Continues the experiment's prompt by up to 100 tokens."""
  from paxlite.decoding import Generator, Sampling
  from paxlite.inference import eos_ids, start_ids

  start = start_ids(e, tokenizer)
  prompt = (start + tokenizer.encode(e.SAMPLE_PROMPT))[: e.MAX_SEQ_LEN - 1]
  generator = Generator(
    fdl.build(e.task()).model,
    params,
    e.MAX_SEQ_LEN,
    Sampling(temperature=0.8),
    eos_ids=eos_ids(e, tokenizer),
    vocab_size=tokenizer.vocab_size,
    mesh=trainer.mesh,
    rules=trainer.rules,
  )
  return tokenizer.decode(prompt[len(start) :] + generator.generate([prompt], 100)[0])


def _check_vocabulary(e: Experiment, inputs: dict[str, Input]) -> None:
  vocab_size = getattr(e, 'VOCAB_SIZE', None)
  for name, data in inputs.items():
    if vocab_size is not None and data.max_token_id >= vocab_size:
      raise UserError(
        f'the {name} data {data.name} has token id {data.max_token_id} and VOCAB_SIZE is '
        f'{vocab_size}: '
        f'--fdl.VOCAB_SIZE={-(-(data.max_token_id + 1) // 128) * 128} or another dataset'
      )


def _check_trainable(trainer: Trainer) -> None:
  params = trainer.states.abstract.params
  optimizer = trainer.task.optimizer
  if not jax.tree.leaves(optimizer.split(params)[0]):
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    raise UserError(
      f'TRAINABLE_VARIABLES={list(optimizer.trainable)} matches no variable as a whole; '
      f'there are {", ".join(names[:3])} …'
    )


def _check_eval_batches(e: Experiment, inputs: dict[str, Input]) -> None:
  for name, data in inputs.items():
    if data.batch_size % e.batch_shards:
      axes = ' × '.join(partitioning.axes_of(e.rules['batch']))
      raise UserError(
        f'EVAL_BATCH_SIZE={data.batch_size} ({name}) is not divisible by {axes} = {e.batch_shards}'
      )


def _bytes_per_device(tree: Any, specs: Any, sizes: dict[str, int]) -> int:
  def one(x: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
    fitted = partitioning.fitting(spec, x.shape, sizes)
    axes = [a for entry in fitted for a in partitioning.axes_of(entry)]
    return x.size * x.dtype.itemsize // math.prod(sizes[a] for a in axes)

  return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))
