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
  """A LanguageModel with peft's choices of LoRA factors."""

  LORA_ALPHA: Training[Positive | None] = (
    None  # LoRA products are multiplied by this / rank; None: the rank
  )
  LORA_RS: Training[bool] = False  # divides LORA_ALPHA by √rank instead (rsLoRA)
  LORA_DROPOUT: Training[Below1] = 0.0  # dropout rate of LoRA inputs
  LORA_TARGETS: Training[list[str]] = []  # weights with LoRA, by peft's or paxlite's names
  LORA_RANK_PATTERN: Training[list[str]] = []  # ranks by weight, 'NAME=RANK', as in peft
  LORA_ALPHA_PATTERN: Training[list[str]] = []  # LORA_ALPHA by weight, 'NAME=ALPHA'
  LORA_LAYERS: Training[list[int]] = []  # layers with LoRA, from 0; []: all
  LORA_MODULES_TO_SAVE: Training[
    list[str]
  ] = []  # weights trained whole besides the factors, by peft's names

  LORA_TOKENS: Training[list[int]] = []  # token ids with trained rows in the embedding and head

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
        'LORA_TARGETS names experts. Their factors change the weights themselves, as in peft: '
        'USE_DORA=False LORA_DROPOUT=0'
      )
