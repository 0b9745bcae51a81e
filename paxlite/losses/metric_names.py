"""What the name of a metric says about its values."""

_LARGER_IS_BETTER = ('acc', 'exact_match', 'fraction_of_correct')  # how such names begin


def larger_is_better(name: str) -> bool:
  """Returns whether a larger value of a metric of evaluations is better, as that of an accuracy."""
  return name.startswith(_LARGER_IS_BETTER)
