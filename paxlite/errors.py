"""What paxlite raises on purpose; `paxlite.main` prints it as one line."""


class UserError(ValueError):
  """Wrong input: the message says what is wrong, where, and the way out, on one line.

  Exit code 2, no traceback. What else escapes is a defect of paxlite and keeps its traceback.
  """


class TrainingError(RuntimeError):
  """Training cannot go on: the message says since when and why. Exit code 1."""
