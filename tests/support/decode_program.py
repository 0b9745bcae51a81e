"""The compiled program that generates tokens, as text."""

from paxlite.generation.engine import Engine


def decode_program(engine: Engine, rows: int = 1, slots: int = 64) -> str:
  """Returns XLA's text of the loop over tokens, after all passes."""
  return engine.lowered(rows, slots).compile().as_text()
