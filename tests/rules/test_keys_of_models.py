"""Compares docs/keys_of_models.md with the tables of keys that import reads.

`python -m tests.rules.test_keys_of_models --update` rewrites the page.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from paxlite.weights import known_keys, meta, rope_keys
from paxlite.weights.family_tables import FAMILIES
from tests.support import runs

PAGE = runs.ROOT / 'docs' / 'keys_of_models.md'
TOP = """# Keys of published models

`paxlite import` reads a key of a published model, or knows that it changes nothing, or refuses
the model with the name of the key. A key that is in none of these tables is refused, unless it is
null. The tables are made from those in `paxlite/weights/`; a test compares them.
"""
HF = """
## config.json of Hugging Face

Which keys are read depends on the family. Each other family refuses them.

| key | families |
|---|---|
"""
ROPE = """
In `rope_parameters` and `rope_scaling` of any family, where `rope_scaling` comes first if a file
has both, as in transformers:

| rope_type | keys that are read |
|---|---|
"""
SOURCES = """
Where two files disagree, import does what transformers does, and says so:

- `model.safetensors` is read before `model.safetensors.index.json` and its shards. Files beside
  them are not read. Several .safetensors files without an index are refused, unless they are all
  shards of one model.
- A tensor that two files hold is refused.
- If `lm_head.weight` is stored and differs from the embedding, both are read, whatever
  `tie_word_embeddings` says.
- The ids that end a text are those of generation_config.json and then those of config.json.
- A folder with adapter_config.json is refused, with or without a model in it: no key of an adapter
  is read.
"""


def code(names: Iterable[str]) -> str:
  return ', '.join(f'`{name}`' for name in names)


def rows(found: Mapping[str, str]) -> str:
  """Returns rows of a table, in which keys with the same right side share one."""
  by_text: dict[str, list[str]] = {}
  for name, text in found.items():
    by_text.setdefault(text, []).append(name)
  return ''.join(f'| {code(names)} | {text} |\n' for text, names in by_text.items())


def neutral(found: Mapping[str, Collection[object]]) -> str:
  texts = {name: code(map(json.dumps, values)) for name, values in found.items()}
  return '\n| key | values that are accepted |\n|---|---|\n' + rows(texts)


def families() -> dict[str, str]:
  """Returns the families that read each key of config.json."""
  by_key: dict[str, list[str]] = {}
  for family, entry in FAMILIES.items():
    for name in dict.fromkeys(name for key in entry.keys for name in key.theirs):
      by_key.setdefault(name, []).append(family)
  everywhere = len(FAMILIES)
  show = lambda names: 'all' if len(names) == everywhere else ', '.join(names)
  return {name: show(by_key[name]) for name in sorted(by_key)}


def harmless(names: Sequence[str] | Collection[str]) -> str:
  return f'\nThese change nothing: {code(sorted(names))}.\n'


def page() -> str:
  quantized = {
    f'quantization_config.{name} of {method}': code(
      'any value' if value is ... else json.dumps(value) for value in values
    )
    for method, keys in known_keys.QUANTIZATION.items()
    for name, values in keys.items()
  }
  yarn = {'yarn': list(rope_keys.MSCALE)}
  kinds = {k: code([*keys, *yarn.get(k, [])]) or '—' for k, keys in rope_keys.KEYS.items()}
  parts = [
    TOP, HF, rows(families()),
    harmless(known_keys.HARMLESS), neutral(known_keys.NEUTRAL),
    '\n| key | values |\n|---|---|\n', rows(quantized),
    ROPE, rows(kinds), harmless(rope_keys.HARMLESS),
    SOURCES,
    "\n## params.json of Meta\n\n| key | becomes |\n|---|---|\n", rows(meta.READ),
    harmless(meta.HARMLESS),
  ]  # fmt: skip
  return ''.join(parts)


def test_the_page_shows_the_tables():
  assert PAGE.read_text() == page(), 'python -m tests.rules.test_keys_of_models --update'


if __name__ == '__main__' and '--update' in sys.argv:
  PAGE.write_text(page())
