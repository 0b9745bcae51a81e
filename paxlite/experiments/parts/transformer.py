"""The parts of a language model, and the config of its Task."""

import copy

import fiddle as fdl
from fiddle import selectors

from paxlite import extensions
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.experiments import unused_values
from paxlite.experiments.parts.decoding import Decoding
from paxlite.experiments.parts.objective import Objective
from paxlite.experiments.parts.stack import BlockKind, Stack
from paxlite.experiments.parts.vocabulary import Vocabulary
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.projection import Projection
from paxlite.optim.model_flops import TokenFlops, rates
from paxlite.optim.optimizers import Optimizer
from paxlite.optim.state_axes import named
from paxlite.training.task import Task


class Transformer(Stack, Objective, Vocabulary, Decoding):
  """A decoder-only transformer, with the defaults of Pax's base class."""

  @property
  def warnings(self) -> list[str]:
    return [*super().warnings, *unused_values.warnings(self, self.unread_by_optimizer)]

  def validate(self) -> None:
    super().validate()
    if self.START_ID is not None and self.START_ID >= self.VOCAB_SIZE:
      raise UserError(
        f'START_ID={self.START_ID} is not a token id: the ids of VOCAB_SIZE={self.VOCAB_SIZE} '
        'begin with 0'
      )

  def task(self) -> fdl.Config:
    return config(
      Task, model=self.model(), optimizer=self.optimizer(), losses=self.losses(),
      reference=self.reference(),
      num_microbatches=1 if self.num_stages > 1 else self.NUM_MICROBATCHES,
      rows_per_example=self.ROWS_PER_EXAMPLE, max_skipped_steps=self.MAX_SKIPPED_STEPS,
      gradient_dtype=self.GRADIENT_DTYPE, frozen_dtype=self.FROZEN_DTYPE,
    )  # fmt: skip

  def model(self) -> fdl.Config:
    lm = self.decoder()
    selectors.select(lm, Projection).set(
      use_bias=self.USE_BIAS, dtype=self.FPROP_DTYPE, w_init=self.weight_init(self.INIT_STD)
    )
    for ffn in selectors.select(lm, FeedForward, check_nonempty=False):
      selectors.select(ffn, Projection).set(use_bias=self.USE_FFN_BIAS)
    if self.USE_QKV_BIAS != self.USE_BIAS:
      for attention in selectors.select(lm, Attention, check_nonempty=False):
        selectors.select(attention.qkv_tpl, Projection).set(use_bias=self.USE_QKV_BIAS)
    if self.USE_LORA:
      extensions.hook('USE_LORA')(self).add_to(lm)
    if self.OUTPUT_INIT_STD != self.INIT_STD:
      self._init_outputs(lm)
    return lm

  def decoder(self) -> fdl.Config:
    """Returns the config of the TransformerLm, whose projections `model` completes."""
    return config(
      TransformerLm, embedding_tpl=self.token_embedding(), position_tpl=self.positions(),
      transformer_tpl=self.stack(), norm_tpl=self.norm(), head_tpl=self.head(),
      logits_bias_tpl=self.logits_bias(), logit_cap=self.SOFTMAX_CAP_LOGITS,
      embedding_dropout=self.EMBEDDING_DROPOUT_PROB, num_loss_chunks=self.NUM_LOSS_CHUNKS,
      prediction_tpls=self.prediction_modules(),
    )  # fmt: skip

  def prediction_modules(self) -> list[fdl.Partial]:
    """Returns the templates of modules behind the stack, which predict further tokens."""
    return []

  @property
  def trained_kinds(self) -> list[BlockKind]:
    """The kinds of all blocks that a step of training computes, each module's included."""
    return self.block_kinds

  def _init_outputs(self, lm: fdl.Config) -> None:
    """Sets separate initial values for the projections to the residual stream."""
    outputs = [a.post_tpl for a in selectors.select(lm, Attention, check_nonempty=False)]
    for ffn in selectors.select(lm, FeedForward, check_nonempty=False):
      ffn.output_tpl = copy.deepcopy(ffn.projection_tpl)
      outputs.append(ffn.output_tpl)
    for projection in outputs:
      if hasattr(fdl.get_callable(projection), 'a_init'):  # factors must not all begin at zero
        projection.a_init = self.weight_init(self.INIT_STD)
      projection.w_init = self.weight_init(self.OUTPUT_INIT_STD)

  @property
  def flops_per_token(self) -> float:
    """Model FLOPs of training all weights per token, with causal attention.

    6 · (parameters in matrix multiplications, the vocabulary's included), and those of attention;
    see attention_flops_of.
    """
    return self._flops(TokenFlops())

  def trained_flops(self, optimizer: Optimizer, boxed: PyTree) -> float:
    return self._flops(rates(named(optimizer.split(boxed)[0]), boxed, self.active_experts))

  def _flops(self, rates: TokenFlops) -> float:
    kinds = self.trained_kinds
    heads = 1 + len(kinds) - len(self.block_kinds)
    attention = [self.attention_flops_of(kind.attention) for kind in kinds]
    first = round((1 - rates.passed) * len(self.block_kinds))
    return (
      rates.weights * self.matmul_params
      + rates.head * heads * self.VOCAB_SIZE * self.MODEL_DIMS
      + sum(attention)
      - sum(attention[:first]) * 2 / 3  # a third is forward
      + rates.factors
    )
