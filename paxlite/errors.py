"""The one exception for mistakes that a user can mend."""


class UserError(ValueError):
  """Wrong input: the message says what is wrong, where, and the way out, on one line.

  `paxlite.main` and the tools print it without a traceback and exit with code 2. Anything else that
  escapes is a defect of paxlite and keeps its traceback.
  """
