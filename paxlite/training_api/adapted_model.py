"""The base model, which all clients share, and the same model with low-rank factors."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.linen import meta
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch as HostBatch
from paxlite.data.device_batches import to_mesh
from paxlite.data.tokenizer import Tokenizer
from paxlite.experiments.language_model import LanguageModel
from paxlite.finetuning.reinforcement.policy_loss import OLD, PolicyLoss
from paxlite.generation.inference import TextModel, load_checkpoint
from paxlite.layers.sown import SOWN
from paxlite.losses.metrics import Batch
from paxlite.losses.outputs import Outputs
from paxlite.parallel import partitioning
from paxlite.quantization.frozen_weights import put_scheme
from paxlite.quantization.schemes import Int8
from paxlite.training.task import Task
from paxlite.weights.families import family_of, hugging_face_entries
from paxlite.weights.lora import named_base, on_hub

ALPHA = 32.0  # as in the published service: the product of factors is multiplied by ALPHA / rank
Arrays = Mapping[str, jax.Array]  # by the names of variables


class AdapterKind(NamedTuple):
  """Which factors an adapter has: their rank, and the LORA_TARGET_LAYERS that have them."""

  rank: int
  layers: str


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """The base model.

  Attributes:
    experiment: Its experiment, with unrolled layers.
    params: Its parameters by name, on the mesh.
    mesh, tokenizer, max_length: See TextModel.
    fingerprint: That of the checkpoint.
    origin: The published weights that the checkpoint was imported from; '' if nothing says it.
    tokenizer_place: Where transformers finds the tokenizer.
  """

  experiment: LanguageModel
  params: Arrays
  mesh: Mesh
  tokenizer: Tokenizer
  max_length: int
  fingerprint: int
  origin: str
  tokenizer_place: str

  @property
  def vocab_size(self) -> int:
    return int(self.params['embedding/emb_var'].shape[0])

  @functools.cached_property
  def text_model(self) -> TextModel:
    """The base without factors, whose engine gets its parameters before each use."""
    return self.as_text_model(self.experiment, task_of(self.experiment))

  def as_text_model(self, e: LanguageModel, task: Task) -> TextModel:
    return TextModel(e, task.model, None, self.mesh, self.tokenizer, self.max_length)


def load_base(
  checkpoint: str, tokenizer: str, overrides: Mapping[str, str], base_weights: str
) -> BaseModel:
  """Loads the base model; the arguments are those of load_checkpoint.

  Raises:
    UserError: It has factors itself, or peft has no names for its weights.
  """
  found = load_checkpoint(checkpoint, tokenizer, overrides, base_weights)
  e = found.experiment
  if e.USE_LORA:
    raise UserError(
      f'{checkpoint} has factors of LoRA itself, but --train gives each client its own: merge them '
      'with paxlite export --to=hf, and import the result'
    )
  if family_of(e) == 'gpt2':
    raise UserError("--train: Hugging Face's gpt2 stores weights transposed, without adapters")
  hugging_face_entries(e)  # adapters are saved by its names
  params = found.fused_projections.unfused(found.params)
  return BaseModel(
    e, traverse_util.flatten_dict(params, sep='/'), found.mesh, found.tokenizer, found.max_length,
    found.source.fingerprint, origin := named_base(checkpoint, base_weights),
    on_hub(origin)[0] or str(found.source.tokenizer or ''),
  )  # fmt: skip


def task_of(e: LanguageModel) -> Task:
  """Returns the task of an experiment, as it is loaded for inference."""
  config = e.build_task()
  if e.INT8_WEIGHTS:
    put_scheme(config.model, Int8)
  found: Task = fdl.build(config)
  return found


def nested(*parts: Arrays) -> PyTree:
  """Returns the tree of variables that are in several parts."""
  return traverse_util.unflatten_dict({k: x for part in parts for k, x in part.items()}, sep='/')


class AdaptedModel:
  """The base with factors of one kind, which are float32 and apart from its own parameters.

  Args:
    base: The base.
    kind: The kind.
  """

  def __init__(self, base: BaseModel, kind: AdapterKind):
    self.base, self.kind = base, kind
    e = base.experiment.replaced(
      USE_LORA=True, LORA_RANK=kind.rank, LORA_TARGET_LAYERS=kind.layers, LORA_ALPHA=ALPHA
    )
    self.experiment = e.replaced(TRAINABLE_VARIABLES=e.factor_variables)
    self.experiment.validate()
    task = task_of(self.experiment)
    self.text_model = base.as_text_model(self.experiment, task)
    # what is saved for gradients would be the largest part of the memory
    self._trained = task_of(self.experiment.replaced(CHECKPOINT_POLICY='SAVE_NOTHING')).model
    rules = self.experiment.rules
    shapes = partitioning.sharded_shapes(task.boxed_params(), base.mesh, rules)
    flat = traverse_util.flatten_dict(shapes, sep='/')
    self.shapes = {k: x for k, x in flat.items() if k not in base.params}

    def init(key: jax.Array) -> Arrays:
      params = traverse_util.flatten_dict(meta.unbox(task.init_params(key)), sep='/')
      return {k: params[k].astype(jnp.float32) for k in self.shapes}

    placed = {k: x.sharding for k, x in self.shapes.items()}
    self._init = jax.jit(init, out_shardings=placed)
    forward = functools.partial(jax.jit, static_argnames='loss')
    self._losses = forward(self._compute)
    self._gradients = forward(jax.value_and_grad(self._compute, has_aux=True))

  def init(self, seed: int) -> Arrays:
    """Returns the factors of a new adapter, which changes nothing yet."""
    return dict(self._init(jax.random.key(seed)))

  def run(
    self, factors: Arrays, batch: HostBatch, loss: str, settings: Mapping[str, float], learns: bool
  ) -> tuple[jax.Array, jax.Array, Arrays | None]:
    """Returns the sum of the losses, the log-probabilities of the labels, and the gradients.

    Args:
      factors: The factors.
      batch: The batch, on the host.
      loss, settings: See examples.LOSSES.
      learns: Whether the gradients are wanted.
    """
    mesh, rules = self.base.mesh, self.experiment.rules
    sharding = partitioning.batch_sharding(mesh, rules, batch['ids'].shape)
    with partitioning.activate(mesh, rules):
      given = factors, self.base.params, to_mesh(batch, sharding, len(batch['ids'])), settings
      if not learns:
        return (*self._losses(*given, loss=loss), None)
      (value, log_probs), gradients = self._gradients(*given, loss=loss)
    return value, log_probs, gradients

  def _compute(
    self, factors: Arrays, base: Arrays, batch: Batch, settings: Mapping[str, jax.Array], loss: str
  ) -> tuple[jax.Array, jax.Array]:
    with partitioning.activate(self.base.mesh, self.experiment.rules):
      model = self._trained.bind({'params': nested(base, factors)}, mutable=SOWN)
      outputs = Outputs(model, batch)
      return _LOSSES[loss](outputs, batch, settings), outputs.log_probs


def _cross_entropy(outputs: Outputs, batch: Batch, settings: Mapping[str, jax.Array]) -> jax.Array:
  return -(outputs.log_probs * batch['weights']).sum()


def _policy(outputs: Outputs, batch: Batch, settings: Mapping[str, jax.Array]) -> jax.Array:
  """−Σ min(r·A, clip(r)·A), which without settings is −Σ r·A."""
  low: Any = settings.get('clip_low_threshold', -jnp.inf)
  high: Any = settings.get('clip_high_threshold', jnp.inf)
  return PolicyLoss(mean='dapo', clip_low=1 - low, clip_high=high - 1)(outputs, batch)


def _cispo(outputs: Outputs, batch: Batch, settings: Mapping[str, jax.Array]) -> jax.Array:
  """−Σ clip(r)·A·ln π, where r has no gradient (https://arxiv.org/abs/2506.13585, equation 4)."""
  log_probs_BT, is_own_BT = outputs.log_probs, batch['weights']
  ratio_BT = jnp.exp(jnp.where(is_own_BT > 0, log_probs_BT - batch[OLD], 0))
  clipped_BT = jnp.clip(ratio_BT, settings['clip_low_threshold'], settings['clip_high_threshold'])
  fixed_BT = jax.lax.stop_gradient(clipped_BT) * batch['advantages'] * is_own_BT
  return -(fixed_BT * log_probs_BT).sum()


_LOSSES: Mapping[str, Callable[[Outputs, Batch, Mapping[str, jax.Array]], jax.Array]] = {
  'cross_entropy': _cross_entropy,
  'importance_sampling': _policy,
  'ppo': _policy,
  'cispo': _cispo,
}
