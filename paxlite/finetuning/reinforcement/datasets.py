"""Prompts that the model answers: `class Mine(PromptFiles, Policy, SmolLM135M)`."""

import copy
from collections.abc import Sequence

import fiddle as fdl
import jax
from jax.sharding import Mesh

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.config.generation import Sampling
from paxlite.config.templates import config
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.data.text import Split
from paxlite.data.tokenizer import open_tokenizer
from paxlite.finetuning.chats.datasets import SftFiles
from paxlite.finetuning.reinforcement.actor import Actor
from paxlite.finetuning.reinforcement.ahead_rollouts import AheadRollouts
from paxlite.finetuning.reinforcement.answer_rollouts import AnswerRollouts, RolloutOptions
from paxlite.finetuning.reinforcement.attributes import Answering, Policy
from paxlite.finetuning.reinforcement.engine_check import EngineCheck
from paxlite.finetuning.reinforcement.judges import Judges
from paxlite.finetuning.reinforcement.label_log_probs import LabelLogProbs
from paxlite.finetuning.reinforcement.packing import Packing
from paxlite.finetuning.reinforcement.policy_loss import PackedPolicyLoss
from paxlite.finetuning.reinforcement.policy_rollouts import PolicyOptions, PolicyRollouts
from paxlite.finetuning.reinforcement.prompts import Prompts
from paxlite.finetuning.reinforcement.rollout_devices import rollout_mesh, training_devices
from paxlite.parallel import mesh


class AnsweredPrompts(SftFiles, Answering):
  """Prompts in TRAIN_FILES: JSON lines with "prompt" or "messages" (see prompts.py)."""

  PACKED_INPUT = False

  def validate(self) -> None:
    super().validate()
    for name, value in self.generating_values.items():
      if getattr(self, name) != value:
        raise UserError(
          f'{name}={getattr(self, name)}: an answer would depend on the others in its batch, and '
          f'training would see other numbers: {name}={value}'
        )
    if self.EVAL_FILES or self.EVAL_FRACTION:
      raise UserError(
        'EVAL_FILES and EVAL_FRACTION are not supported with rollouts: steps report metrics, and '
        'paxlite zero-shot evaluates a checkpoint on a task'
      )
    self._check_devices()

  def _check_devices(self) -> None:
    """Raises UserError if the devices that generate cannot split what they compute."""
    count = self.ROLLOUT_DEVICES
    if count and self.num_stages > 1:
      raise UserError(f'ROLLOUT_DEVICES={count} and a mesh with stages: ROLLOUT_DEVICES=0')
    rows = self.batch_size // self.NUM_MICROBATCHES
    if count and rows % count:
      raise UserError(
        f'ROLLOUT_DEVICES={count} must divide the {rows} sequences of a microbatch: change it, '
        'PERCORE_BATCH_SIZE or NUM_MICROBATCHES'
      )

  def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    size, count = self.num_devices, self.ROLLOUT_DEVICES
    if count and (devices is None or len(devices) == size + count):
      devices = training_devices(size, count, devices)
    return super().mesh(devices)

  @property
  def warnings(self) -> list[str]:
    found = list(super().warnings)
    if self.PACKED_INPUT and (self.NUM_MICROBATCHES == 1 or self.num_stages > 1):
      found.append(
        'PACKED_INPUT=True leaves the last microbatches empty, which are skipped; set '
        'NUM_MICROBATCHES to 2 or more, or it saves nothing.'
      )
    if self.ROLLOUT_DEVICES and not self.MAX_STALENESS:
      found.append(
        f'ROLLOUT_DEVICES={self.ROLLOUT_DEVICES} with MAX_STALENESS=0: training and generation '
        f'wait for each other; set MAX_STALENESS={self.steps_per_rollout} or more.'
      )
    return found

  def task(self) -> fdl.Config:
    task = super().task()
    if self.PACKED_INPUT:
      task.skips_empty = True
    return task

  @property
  def prompts(self) -> fdl.Config:
    return self._source(self.TRAIN_FILES, 'all')

  def train_input(self) -> fdl.Config:
    # a command that only loads the model has other batches and lengths
    if self.MAX_NEW_TOKENS >= self.MAX_SEQ_LEN:
      raise UserError(
        f'MAX_NEW_TOKENS={self.MAX_NEW_TOKENS} leaves no room for a prompt in MAX_SEQ_LEN='
        f'{self.MAX_SEQ_LEN}'
      )
    return super().train_input()

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    return config(
      Prompts,
      files=list(files),
      encoding=self._encoding,
      most_tokens=self.MAX_SEQ_LEN - self.MAX_NEW_TOKENS,
      skip_unreadable=self.SKIP_UNREADABLE,
      cache=self.EXAMPLE_CACHE,
    )

  @property
  def _encoding(self) -> fdl.Config:
    return config(
      ChatEncoding,
      tokenizer=config(open_tokenizer, path=self.VOCAB_PATH or self._restored_tokenizer),
      vocab_size=self.VOCAB_SIZE,
      start_id=self.START_ID,
      eos_ids=list(self.EOS_IDS),
      chat_template=self.CHAT_TEMPLATE,
      date=self.CHAT_DATE,
      thinking=self.CHAT_THINKING,
    )

  def _meshes(self) -> tuple[fdl.Config, fdl.Config]:
    """Returns the mesh that trains and the one that generates, which may be the same."""
    axes, count = list(self.MESH_AXES), self.ROLLOUT_DEVICES
    ici, dcn = list(self.ICI_MESH_SHAPE), list(self.DCN_MESH_SHAPE)
    training = config(mesh.make_mesh, ici=ici, dcn=dcn, axes=axes)
    if not count:
      return training, training
    training.devices = config(training_devices, mesh_size=self.num_devices, count=count)
    return training, config(rollout_mesh, mesh_size=self.num_devices, count=count, axes=axes)

  def input(self, source: fdl.Config) -> fdl.Config:
    training_mesh, generating_mesh = self._meshes()
    actor = config(
      Actor,
      encoding=source.encoding,
      model=self.plain.build_task().model,
      mesh=generating_mesh,
      rules=self.rules,
      max_length=self.num_positions,
      sampling=config(Sampling, temperature=self.ROLLOUT_TEMPERATURE),
      rows=self.batch_size * self.BATCHES_PER_ROLLOUT,
      room=self.MAX_SEQ_LEN + 1,
      max_tokens=self.MAX_NEW_TOKENS,
    )
    if self.ENGINE_CHECK_INTERVAL and not self.is_off_policy:  # else older parameters draw
      actor.check = config(
        EngineCheck,
        model=actor.model,
        mesh=training_mesh,
        rules=self.rules,
        rows=self.batch_size // self.NUM_MICROBATCHES,
        interval=self.ENGINE_CHECK_INTERVAL,
        tolerance=self.ENGINE_TOLERANCE,
        experts_tolerance=self.ENGINE_EXPERTS_TOLERANCE,
      )
    options = config(
      RolloutOptions,
      prompts=source,
      actor=actor,
      batch_size=self.batch_size,
      seq_len=self.MAX_SEQ_LEN,
      seed=self.SEED,
      max_token_id=self.VOCAB_SIZE - 1,
      batches=self.BATCHES_PER_ROLLOUT,
      updates=self.UPDATES_PER_BATCH,
      kept_episodes=self.KEPT_EPISODES,
    )
    if self.PACKED_INPUT:
      options.packing = config(
        Packing, microbatches=self.NUM_MICROBATCHES, most_segments=self.max_segments_per_seq
      )
    return config(AnswerRollouts, options=options)


class PromptFiles(AnsweredPrompts, Policy):
  """Prompts, with rewards of the answers to them."""

  @property
  def dataset(self) -> str:
    return 'prompts with rewards'

  def validate(self) -> None:
    super().validate()
    self._check_updates()
    groups = max(1, self.batch_size // self.GROUP_SIZE * self.BATCHES_PER_ROLLOUT)
    fewest = 1 + -(-self.PARTIAL_ROLLOUTS // groups)  # where groups end in their order
    if fewest > self.ROLLOUTS_PER_ANSWER:
      raise UserError(
        f'ROLLOUTS_PER_ANSWER={self.ROLLOUTS_PER_ANSWER} must be {fewest} or more with '
        f'PARTIAL_ROLLOUTS={self.PARTIAL_ROLLOUTS} and {groups} groups in a rollout'
      )

  def losses(self) -> dict[str, fdl.Config]:
    found = super().losses()
    if self.PACKED_INPUT:
      fdl.update_callable(found['policy_loss'], PackedPolicyLoss)
    return found

  def _check_updates(self) -> None:
    """Raises UserError if a ratio would compare other numbers than those of two updates."""
    plain: dict[str, object] = {'DROPOUT_PROB': 0.0, 'EMBEDDING_DROPOUT_PROB': 0.0}
    plain |= {'USE_FP8': False, 'USE_TE': 'off', 'USE_INT8': 'off'}
    for name, value in plain.items():
      found = getattr(self, name, value)
      if (self.steps_per_rollout > 1 or self.is_off_policy) and found != value:
        raise UserError(
          f'{name}={found}: with several updates per answer, the probability ratio would compare '
          f'numbers of two kinds: {name}={value}'
        )

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    source = super()._source(files, split)
    source.tools = list(self.TOOLS)
    return source

  def train_input(self) -> fdl.Config:
    if not self.REWARDS and not self.ENVIRONMENT:
      example = shell.flag('REWARDS', ['my_rewards.correct'])
      raise UserError(f'{example} is missing: set a reward or an ENVIRONMENT')
    if self.batch_size % self.GROUP_SIZE:
      raise UserError(
        f'a batch of {self.batch_size} answers is not divisible by GROUP_SIZE={self.GROUP_SIZE}: '
        'change it, or PERCORE_BATCH_SIZE'
      )
    return super().train_input()

  def input(self, source: fdl.Config) -> fdl.Config:
    rollouts = super().input(source)
    actor = rollouts.options.actor
    actor.max_turns, actor.max_seconds = self.MAX_TURNS, self.EPISODE_TIMEOUT
    fdl.update_callable(rollouts, PolicyRollouts)
    fdl.update_callable(rollouts.options, PolicyOptions)
    fdl.assign(
      rollouts.options,
      judges=config(
        Judges,
        rewards=list(self.REWARDS),
        weights=list(self.REWARD_WEIGHTS) or [1.0] * len(self.REWARDS),
        environment=self.ENVIRONMENT,
        seconds=self.REWARD_TIMEOUT,
        tools=list(self.TOOLS),
      ),
      group_size=self.GROUP_SIZE,
      scale=self.ADVANTAGE_SCALE,
      credit=self.TURN_CREDIT,
    )
    log_probs = config(
      LabelLogProbs,
      model=actor.model,
      mesh=self._meshes()[0],
      rules=self.rules,
      temperature=self.ROLLOUT_TEMPERATURE,
      rows=self.batch_size // self.NUM_MICROBATCHES,
    )
    if self.steps_per_rollout > 1 or self.is_off_policy:
      rollouts.options.log_probs = log_probs
    if self.is_off_policy:
      fdl.update_callable(rollouts, AheadRollouts)
      fdl.assign(
        rollouts,
        behaviour=copy.copy(log_probs) if self.ROLLOUT_DEVICES else log_probs,
        further=self.PARTIAL_ROLLOUTS,
        ahead=self.MAX_STALENESS // self.steps_per_rollout,
        most_rollouts=self.ROLLOUTS_PER_ANSWER,
        beside=self.ROLLOUT_DEVICES > 0,
      )
      rollouts.behaviour.mesh = actor.mesh
      actor.rows = actor.rows + self.PARTIAL_ROLLOUTS * self.GROUP_SIZE
    else:
      rollouts.rounds = self.DYNAMIC_SAMPLING_ROUNDS
    return rollouts
