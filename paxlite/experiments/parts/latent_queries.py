"""Queries that come from latents, and indexers, which choose the keys of such queries."""

from paxlite.config.attribute_kinds import Count, Function, NotNegativeInt, Shape
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel


class QueryLatents(LanguageModel, subject='Latent attention (DeepSeek)'):
  """A LanguageModel that may compute queries from latents."""

  QUERY_LATENT_DIMS: Shape[NotNegativeInt] = 0  # width of the query latent; 0: none


class Indexers(QueryLatents, subject='Sparse attention (DeepSeek-V3.2)'):
  """A LanguageModel in which an indexer chooses what a query sees.

  The indexer is frozen, as its choice has no gradient: it keeps the weights that are imported.
  """

  INDEXER_HEADS: Shape[Count] = 64  # heads of the indexer, which chooses keys
  INDEXER_DIMS_PER_HEAD: Shape[Count] = 128  # indexer head width
  INDEXER_TOP_K: Function[Count] = 2048  # keys that the indexer chooses per query

  @property
  def trains_all(self) -> bool:
    return False

  def validate(self) -> None:
    super().validate()
    if not self.QUERY_LATENT_DIMS:
      raise UserError('the indexer reads latents of queries: QUERY_LATENT_DIMS must be above 0')
