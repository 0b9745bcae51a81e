"""A trained or imported model that continues text."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import fiddle as fdl
import jax
from jax.sharding import Mesh

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.chats.conversations import Message, Tool
from paxlite.chats.model_texts import GenerationSettings, encoding_of, generation_of
from paxlite.checkpointing.restore import Restore, RestorePlan
from paxlite.checkpointing.source import Source, find_source
from paxlite.config.edits import EDITS
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError, located
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.data.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import class_of
from paxlite.generation.cache import Pages
from paxlite.generation.engine import Engine
from paxlite.generation.fused_projections import FusedProjections
from paxlite.layers.language_model import TransformerLm
from paxlite.parallel import devices, mesh, partitioning
from paxlite.parallel.quantized_weights import quantizations
from paxlite.programs.launch import values_of
from paxlite.quantization.frozen_weights import put_scheme
from paxlite.quantization.schemes import Int8


@dataclasses.dataclass(frozen=True)
class TextModel:
  """A model with its tokenizer."""

  experiment: LanguageModel  # the experiment of the model
  model: TransformerLm
  params: PyTree | None  # the parameters of `model` on the mesh; None: they are set before each use
  mesh: Mesh  # the mesh of the devices that hold the parameters
  tokenizer: Tokenizer  # the tokenizer, which converts text to ids and back
  max_length: int  # the most tokens of a text, prompt and answer together

  def engine(
    self,
    sampling: Sampling | None = None,
    chat: bool = False,
    most_rows: int | None = None,
    steady: bool = False,
    drafts: bool = False,
  ) -> Engine:
    """Returns an engine that continues prompts.

    Args:
      sampling: How tokens are chosen; None: as the experiment says.
      chat: Whether the prompts are those of a chat; see `ends`.
      most_rows: The most answers that are generated at a time; None: as the experiment says.
      steady: See Engine.
      drafts: See Engine.

    Raises:
      UserError: If KV_CACHE_DTYPE or KV_CACHE_TOKENS does not support the model or the mesh.
    """
    e = self.experiment
    tokens = e.KV_CACHE_TOKENS
    engine = Engine(
      self.model, self.params, self.max_length,
      self.settings.sampling if sampling is None else sampling, ends=self.ends(chat),
      is_token=self.tokenizer.is_token, tokenizer=self.tokenizer, mesh=self.mesh, rules=e.rules,
      most_rows=e.DECODE_BATCH_SIZE if most_rows is None else most_rows, steady=steady,
      drafts=drafts, kv_cache_dtype=e.KV_CACHE_DTYPE,
      pages=None if tokens is None else Pages.of(tokens),
    )  # fmt: skip
    if self.params is not None and (e.KV_CACHE_DTYPE, tokens) != (None, None):
      engine.cache_bytes(1, 1)  # refuses a model before anything is written
    return engine

  def ends(self, chat: bool) -> list[int]:
    """Returns the tokens that end an answer: in a chat, also that which its template puts there."""
    return self.settings.ends_of(chat)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, after the model's start id if it has one."""
    return self.encoding.prompt(text)

  def encode_chat(
    self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, special: bool = True
  ) -> list[int]:
    """Returns the ids of a conversation; see ChatEncoding.chat_prompt."""
    return self.encoding.chat_prompt(messages, tools, special)

  @functools.cached_property
  def settings(self) -> GenerationSettings:
    """How the model generates where a request does not say it."""
    return generation_of(self.experiment, self.tokenizer)

  @functools.cached_property
  def encoding(self) -> ChatEncoding:
    """The encoder of texts and conversations for the model."""
    return encoding_of(self.experiment, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class Inference(TextModel):
  """A loaded model, with unrolled layers and parameters in the experiment's FPROP_DTYPE."""

  source: Source  # the checkpoint or imported weights that the parameters come from
  # how projections of one input were fused: see generation.fused_layers
  fused_projections: FusedProjections


def load(
  experiment: LanguageModel,
  source: Source,
  restore: Restore,
  tokenizer_path: str = '',
  max_length: int | None = None,
) -> Inference:
  """Loads the weights of `restore` into the experiment's model.

  Raises UserError if there is no tokenizer, its vocabulary is another one, or the weights have
  another shape.

  Args:
    experiment: The experiment as it was trained. The model is built from a copy with unrolled
      layers, which decodes without recomputation.
    source: The checkpoint, whose tokenizer is used where `tokenizer_path` is ''.
    restore: The path of the weights and the rules by which they are restored.
    tokenizer_path: A tokenizer file or its folder; '' looks next to the weights and in VOCAB_PATH.
    max_length: The most tokens of a text; None: as many as the model has positions.
  """
  refuse_te_layers(source)
  if experiment.gives_rewards:
    raise UserError(
      f'{source.folder} is of a {type(experiment).__name__}, which computes rewards, not text'
    )
  tokenizer = open_tokenizer(tokenizer_path or str(source.tokenizer or ''))
  check_vocabulary(tokenizer, experiment.VOCAB_SIZE)
  unrolled = experiment.plain.replaced(**experiment.decoding_values)
  mesh = experiment.mesh()
  config = unrolled.build_task()
  if unrolled.INT8_WEIGHTS:
    put_scheme(config.model, Int8)
  boxed = {'params': jax.eval_shape(fdl.build(config).init_params, jax.random.key(0))}
  quantized = quantizations(boxed, mesh, unrolled.rules)
  dtype = lambda path, x: x.dtype if path_name(path[:-1]) in quantized else unrolled.FPROP_DTYPE
  abstract = jax.tree_util.tree_map_with_path(
    lambda path, x: x.update(dtype=dtype(path, x)),
    partitioning.sharded_shapes(boxed, mesh, unrolled.rules),
  )
  plan = RestorePlan(restore, abstract, source, quantized)
  missing = plan.fresh + plan.ignored
  if missing:
    raise UserError(f'{source.folder} lacks {missing[0]}, without which no text can be generated')
  load_one = lambda path, like: plan.load(path_name(path), like)
  params = jax.tree_util.tree_map_with_path(load_one, abstract)['params']
  fused = FusedProjections(config, mesh, unrolled.rules)
  params = fused.fused(params)
  positions = experiment.num_positions if max_length is None else max_length
  model = fdl.build(config).model
  return Inference(unrolled, model, params, mesh, tokenizer, positions, source, fused)


def load_checkpoint(
  checkpoint: str,
  tokenizer_path: str = '',
  overrides: Mapping[str, str] | None = None,
  base_weights: str = '',
) -> Inference:
  """Loads the model of a job_log_dir or of imported weights, sharded over all devices of the run.

  Args:
    checkpoint: The folder of the checkpoint; see source.find_source.
    tokenizer_path: A tokenizer file or its folder; '' looks next to the weights and in VOCAB_PATH.
    overrides: Values as text, by attribute or path, as in NAME=VALUE. MAX_SEQ_LEN is the
      most tokens of a text here, which otherwise has as many as the model has positions.
    base_weights: The folder of the base weights of a LoRA run, if they were moved.
  """
  source = find_source(checkpoint, base_weights)
  trained = experiment_of(source)
  here = dict(
    MESH_AXES=list(mesh.MESH_AXES),
    ICI_MESH_SHAPE=[1, 1, len(devices.present())],
    DCN_MESH_SHAPE=[1, 1, 1],
  )
  cls = type(trained)
  changes = values_of(cls, overrides or {}, trained.CONFIG_EDITS)
  without: dict[str, object] = {
    'CHECKPOINT_RESTORE_PATH': '', 'CHECKPOINT_IGNORE_RULES': [], 'CHECKPOINT_RENAME_RULES': [],
    'CHECKPOINT_RESTORE_STATE': False, 'CHECKPOINT_RESTORE_CHANGES': [],
  }  # fmt: skip
  positions = trained.MAX_POSITION_EMBEDDINGS  # may derive from the path that is left out here
  kept = {
    'PERCORE_BATCH_SIZE': 1.0, 'NUM_MICROBATCHES': 1, 'ROWS_PER_EXAMPLE': 1,
    'MAX_POSITION_EMBEDDINGS': positions,
  }  # fmt: skip
  experiment = trained.replaced(**(without | here | kept | changes))
  longest = experiment.MAX_SEQ_LEN if 'MAX_SEQ_LEN' in changes else None
  if longest is not None and not experiment.has_position_table:
    more = max(experiment.MAX_POSITION_EMBEDDINGS, longest)
    experiment = experiment.replaced(MAX_POSITION_EMBEDDINGS=more)
  experiment.validate()
  if EDITS in changes:
    experiment.check_edits()
  return load(experiment, source, Restore(checkpoint), tokenizer_path, longest)


def load_before(
  checkpoint: str,
  tokenizer_path: str = '',
  overrides: Mapping[str, str] | None = None,
  base_weights: str = '',
) -> Inference:
  """Loads the weights that a run began with; texts and chats become ids as in the run.

  The arguments are those of load_checkpoint. Raises UserError if the run began without weights, or
  they are gone.
  """
  source = find_source(checkpoint, base_weights)
  run = experiment_of(source)
  path = base_weights or run.CHECKPOINT_RESTORE_PATH
  if not path:
    raise UserError(f'{checkpoint} started without weights, so it has no initial weights to show')
  tokenizer = tokenizer_path or str(source.tokenizer or '')
  with located('the weights before the training'):
    found = load_checkpoint(path, tokenizer, overrides)
  names = {'CHAT_TEMPLATE', 'CHAT_DATE', 'CHAT_THINKING', 'START_ID'} - set(overrides or {})
  same = found.experiment.replaced(**{name: getattr(run, name) for name in names})
  return dataclasses.replace(found, experiment=same)


def experiment_of(source: Source) -> LanguageModel:
  """Returns the experiment that a checkpoint was trained with.

  Raises UserError if the experiment is not known, it is not a language model, or the checkpoint has
  a value of an attribute that other models alone have now.
  """
  found = source.written_by
  cls = class_of(found)
  if not issubclass(cls, LanguageModel):
    raise UserError(f'{source.experiment}: {found["experiment"]} is not a language model')
  with located(str(source.experiment)):
    options.refuse_lost(cls, found['values'])
  return cls(**{k: v for k, v in found['values'].items() if hasattr(cls, k)})


def refuse_te_layers(source: Source) -> None:
  """Raises UserError if the weights belong to the fused layers of Transformer Engine."""
  if source.experiment.is_file() and source.written_by['values'].get('USE_TE') == 'layer':
    raise UserError(
      f"{source.folder} holds weights of Transformer Engine's layers, which do not support "
      'generation: first paxlite convert-te --direction=te2fw'
    )
