"""What `paxlite.main` does with an experiment: train, evaluate, or a dry run."""

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import fiddle as fdl
import jax
from flax.linen import meta

from paxlite import partitioning
from paxlite.checkpoints import Checkpoints
from paxlite.errors import UserError
from paxlite.evaluation import Evaluator
from paxlite.experiment import Experiment
from paxlite.inputs.base import Input
from paxlite.optimizers import path_name
from paxlite.summaries import Summaries, versions
from paxlite.templates import config_text
from paxlite.trainer import Trainer

_VALUES = 'experiment.json'


@dataclasses.dataclass(frozen=True)
class Run:
  """An experiment and where it runs.

  Attributes:
    experiment: Validated numbers.
    folder: job_log_dir.
    save: Whether training writes checkpoints.
    accept_changes: Whether a folder of a different experiment may be continued.
  """

  experiment: Experiment
  folder: pathlib.Path
  save: bool = True
  accept_changes: bool = False

  def trainer(self) -> Trainer:
    """Builds everything; raises UserError before a file is written or a program compiled."""
    e = self.experiment
    mesh = partitioning.make_mesh(e.ICI_MESH_SHAPE, e.DCN_MESH_SHAPE)
    task = fdl.build(e.task())
    data = fdl.build(e.train_input())
    eval_data = {name: fdl.build(cfg) for name, cfg in e.eval_inputs().items()}
    _check_vocabulary(e, {'training': data, **eval_data})
    _check_eval_batches(e, mesh, eval_data)
    trainer = Trainer(
      task=task,
      mesh=mesh,
      rules=e.rules,
      data=data,
      eval_data=eval_data,
      checkpoints=self.checkpoints() if self.save else None,
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
    )
    _check_trainable(trainer)
    return trainer

  def checkpoints(self) -> Checkpoints:
    return Checkpoints(self.folder / 'checkpoints', self.experiment.CHECKPOINT_MAX_TO_KEEP)


def train(run: Run) -> None:
  """Trains to MAX_STEPS, continuing what the folder holds, and prints a sample."""
  refuse_other_experiment(run)
  trainer = run.trainer()
  state, step = trainer.initial_state()
  write_configuration(run)  # not before it is known that the folder's checkpoint fits
  state = trainer.train(state, step)
  e = run.experiment
  prompt = getattr(e, 'SAMPLE_PROMPT', None)
  if prompt is not None and jax.process_index() == 0 and jax.process_count() == 1:
    from paxlite.decoding import sample
    from paxlite.inputs.tokenizer import Tokenizer

    tokenizer = Tokenizer(getattr(e, 'VOCAB_PATH', ''))
    text = sample(trainer.task.model, state.params, tokenizer, prompt, e.MAX_SEQ_LEN)
    print(f'\nA sample, continuing {prompt!r}:\n{text}\n')
  if jax.process_index() == 0:
    print(f'Logs, metrics and checkpoints are in {run.folder}', flush=True)


def evaluate(run: Run) -> None:
  """Evaluates the last good checkpoint on every evaluation input."""
  refuse_other_experiment(run)
  checkpoints = run.checkpoints()
  if not checkpoints.steps():
    raise UserError(f'{run.folder} holds no checkpoint to evaluate: train first')
  trainer = run.trainer()
  if not trainer.eval_data:
    raise UserError(f'{type(run.experiment).__name__} has no evaluation input')
  state, step = trainer.initial_state()
  summaries = Summaries(run.folder, start=step, max_steps=step)
  evaluator = Evaluator(trainer.task, trainer.mesh, trainer.rules, trainer.eval_data)
  for name in evaluator.names:
    before = time.perf_counter()
    metrics = evaluator(name, state.params)
    summaries.evaluation(step, name, metrics, time.perf_counter() - before)
  summaries.close()


def dry_run(experiment: Experiment) -> str:
  """The experiment's values, its built config, and what it needs, without a device or a file."""
  return '\n'.join(
    [
      values_text(experiment),
      config_text(experiment.task()),
      '',
      requirements(experiment),
    ]
  )


def requirements(experiment: Experiment) -> str:
  """Parameters, bytes per device, tokens and FLOPs of a step."""
  e = experiment
  task = fdl.build(e.task())
  boxed = jax.eval_shape(task.init, jax.random.key(0))
  specs = partitioning.param_specs(boxed, e.rules)
  state = meta.unbox(boxed)
  trainable, _ = task.optimizer.split(state.params)
  trainable_specs, _ = task.optimizer.split(specs.params)
  sizes = dict(zip(partitioning.MESH_AXES, e.mesh_shape, strict=True))
  count = sum(x.size for x in jax.tree.leaves(state.params))
  trained = sum(x.size for x in jax.tree.leaves(trainable))
  per_device = lambda tree, tree_specs: f'{_bytes_per_device(tree, tree_specs, sizes):,} bytes'
  tokens = e.batch_size * e.MAX_SEQ_LEN
  lines = [
    f'parameters {count:,}',
    f'trainable parameters {trained:,}',
    f'mesh {dict(sizes)}: {e.num_devices:,} devices, {jax.device_count():,} present',
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
  return '\n'.join([f'# {name}', *(f'{k} = {v!r}' for k, v in experiment.values().items()), ''])


def write_configuration(run: Run) -> None:
  """Writes what the run is into its folder: values, built config, versions."""
  if jax.process_index() != 0:
    return
  from fiddle.experimental import serialization

  e, folder = run.experiment, run.folder
  folder.mkdir(parents=True, exist_ok=True)
  task = e.task()
  (folder / _VALUES).write_text(json.dumps(_identity(e), indent=2) + '\n')
  (folder / 'experiment.txt').write_text(values_text(e))
  (folder / 'task.txt').write_text(config_text(task) + '\n')
  (folder / 'task.json').write_text(serialization.dump_json(task, indent=1) + '\n')
  (folder / 'versions.json').write_text(json.dumps(versions(), indent=2) + '\n')


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


def _identity(e: Experiment) -> dict[str, Any]:
  cls = type(e)
  return {'experiment': f'{cls.__module__}.{cls.__qualname__}', 'values': e.values()}


def _check_vocabulary(e: Experiment, inputs: dict[str, Input]) -> None:
  vocab_size = getattr(e, 'VOCAB_SIZE', None)
  for name, data in inputs.items():
    if vocab_size is not None and data.max_token_id >= vocab_size:
      raise UserError(
        f'the {name} data has token id {data.max_token_id} and VOCAB_SIZE is {vocab_size}: '
        f'--fdl.VOCAB_SIZE={-(-(data.max_token_id + 1) // 128) * 128} or another dataset'
      )


def _check_trainable(trainer: Trainer) -> None:
  params = trainer.abstract_state.params
  optimizer = trainer.task.optimizer
  if not jax.tree.leaves(optimizer.split(params)[0]):
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    raise UserError(
      f'TRAINABLE_VARIABLES={list(optimizer.trainable)} matches no variable as a whole; '
      f'there are {", ".join(names[:3])} …'
    )


def _check_eval_batches(e: Experiment, mesh: Any, inputs: dict[str, Input]) -> None:
  shards = mesh.shape['replica'] * mesh.shape['data']
  for name, data in inputs.items():
    if data.batch_size % shards:
      raise UserError(
        f'EVAL_BATCH_SIZE={data.batch_size} ({name}) is not divisible by replica × data = {shards}'
      )


def _bytes_per_device(tree: Any, specs: Any, sizes: dict[str, int]) -> int:
  def one(x: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
    fitted = partitioning.fitting(spec, x.shape, sizes)
    axes = [a for entry in fitted if entry for a in ((entry,) if isinstance(entry, str) else entry)]
    return x.size * x.dtype.itemsize // math.prod(sizes[a] for a in axes)

  return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))
