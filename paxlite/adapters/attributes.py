"""Attributes of low-rank factors that few runs state: which weights have them, and their sizes."""

from paxlite.adapters.factors import LowRankFactors
from paxlite.config.attribute_kinds import Below1, Positive, Training
from paxlite.core.errors import UserError
from paxlite.core.variable_names import TOKEN_ROWS
from paxlite.experiments.language_model import LanguageModel


class AdapterChoices(
  LanguageModel,
  subject='Adapters',
  beside={
    'USE_LORA': 'LORA_ALPHA LORA_RS LORA_DROPOUT LORA_TARGETS LORA_RANK_PATTERN LORA_ALPHA_PATTERN '
    'LORA_LAYERS LORA_MODULES_TO_SAVE LORA_TOKENS'
  },
):
  """A LanguageModel whose factors with USE_LORA are chosen as peft chooses them."""

  LORA_ALPHA: Training[Positive | None] = (
    None  # the product of LoRA's factors is multiplied by this / rank; None: the rank
  )
  LORA_RS: Training[bool] = False  # divides LORA_ALPHA by the root of the rank instead (rsLoRA)
  LORA_DROPOUT: Training[Below1] = 0.0  # dropout rate of the inputs of LoRA's factors
  LORA_TARGETS: Training[list[str]] = []  # weights with factors, by peft's names or by ours
  LORA_RANK_PATTERN: Training[list[str]] = []  # ranks of some weights, 'NAME=RANK', as peft's
  LORA_ALPHA_PATTERN: Training[list[str]] = []  # LORA_ALPHA of some weights, 'NAME=ALPHA'
  LORA_LAYERS: Training[list[int]] = []  # layers with factors, from 0; []: all
  LORA_MODULES_TO_SAVE: Training[
    list[str]
  ] = []  # weights beside the factors that are trained whole, by peft's names

  LORA_TOKENS: Training[
    list[int]
  ] = []  # ids whose rows of the embedding and of the head are trained beside the factors

  @property
  def factor_variables(self) -> list[str]:
    rows = [TOKEN_ROWS] if self.LORA_TOKENS else []
    return [*super().factor_variables, *LowRankFactors(self).whole_variables, *rows]

  def validate(self) -> None:
    super().validate()
    if not self.USE_LORA:
      return
    factors = LowRankFactors(self)
    tables = [p for p in factors.whole_variables if p.startswith(('embedding', 'softmax'))]
    if self.LORA_TOKENS and tables:
      raise UserError('LORA_TOKENS and LORA_MODULES_TO_SAVE both train rows: leave one of them out')
    wrong = [i for i in self.LORA_TOKENS if not 0 <= i < (self.vocab_size or 0)]
    if wrong or len({*self.LORA_TOKENS}) < len(self.LORA_TOKENS):
      raise UserError(
        f'LORA_TOKENS={self.LORA_TOKENS} must be ids below VOCAB_SIZE={self.vocab_size}, each once'
      )
    if not factors.chooses:
      return
    if self.num_stages > 1:
      raise UserError('LORA_TARGETS, LORA_LAYERS and patterns need a mesh without stages')
    experts = [name for name, *_ in factors.chosen or () if name.endswith('_factors')]
    if experts and (self.USE_DORA or self.LORA_DROPOUT):
      raise UserError(
        'LORA_TARGETS names experts, whose factors change the weights themselves, as in peft: '
        'USE_DORA=False LORA_DROPOUT=0'
      )
