"""The tensors of an indexer, which chooses the keys of sparse attention."""

from collections.abc import Mapping

from paxlite.experiments.deepseek_sparse import DeepSeekV3_2
from paxlite.weights.tensor_entries import Entry, bias_of, head_transforms, same, transposed


def indexer_entries(e: DeepSeekV3_2, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of the indexer of one layer of attention, whose variables are in `ours`."""
  D, Q, N, H = e.MODEL_DIMS, e.QUERY_LATENT_DIMS, e.INDEXER_HEADS, e.INDEXER_DIMS_PER_HEAD
  query = Entry(
    name['index_query'], (N * H, Q), f'{ours}/query/w', (Q, N, H), *head_transforms(N, H, None)
  )
  return [
    query,
    transposed(name['index_key'], (H, D), f'{ours}/key/w'),
    same(name['index_norm'], (H,), f'{ours}/key_norm/scale'),
    same(bias_of(name['index_norm']), (H,), f'{ours}/key_norm/bias'),
    transposed(name['index_weights'], (N, D), f'{ours}/weights/w'),
  ]
