"""Whether a larger or a smaller value of a metric is better."""

from collections.abc import Collection, Mapping

# How the names of such metrics begin, of zero-shot tasks and of paxlite's own losses. Metrics of
# other losses are known where the losses are, and in the folders of runs.
_LARGER_IS_BETTER = (
  'acc', 'exact_match', 'pass@', 'fraction_of_correct', 'teacher_agreement', 'margin',
  'rewards/accuracies', 'rewards/margins', 'rewards/chosen',
)  # fmt: skip


def larger_is_better(name: str, losses: Mapping[str, Collection[str]] | None = None) -> bool:
  """Returns whether a larger value of a metric of evaluations is better; of a loss, it is not.

  Args:
    name: The metric.
    losses: For each loss by its name, the metrics of which it states this; None: not known.
  """
  losses = losses or {}
  if name in losses:
    return False
  return any(name in stated for stated in losses.values()) or name.startswith(_LARGER_IS_BETTER)
