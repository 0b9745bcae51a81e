"""Compares docs/keys_of_models.md with the tables of keys that import reads.

`python -m tests.rules.test_keys_of_models --update` rewrites the page.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence

from paxlite.weights import known_keys, meta, rope_keys
from paxlite.weights.commands.families import code, grouped
from tests.support import runs

PAGE = runs.ROOT / 'docs' / 'keys_of_models.md'
TOP = """# Keys of published models

`paxlite import` reads each key of a published model, knows that it changes nothing, or refuses the
model and names the key. A key in none of these tables is refused, unless it is null. The tables
are generated from `paxlite/weights/`.
"""
HF = """
## config.json of Hugging Face

Each family reads some keys and refuses those of other families. `paxlite families NAME` prints the
keys of a family, and `paxlite families KEY` the families that read a key. The site has a table of
all here.

<!-- keys of families -->
"""
ROPE = """
In `rope_parameters` and `rope_scaling` of any family; if a file has both, `rope_scaling` comes
first, as in transformers:

| rope_type | keys that are read |
|---|---|
"""
SOURCES = """
If two files disagree, `paxlite import` does what transformers does, and says so:

- `model.safetensors` comes before `model.safetensors.index.json` and its shards; other weight files
  are not read. Several .safetensors files without an index are refused, unless they are all shards
  of one model.
- A tensor in two files is refused.
- If `lm_head.weight` is stored and differs from the embedding, both are read, whatever
  `tie_word_embeddings` says.
- Stop tokens are those of generation_config.json and then those of config.json.
- A folder with adapter_config.json and a model is refused. Without a model, it is an adapter, for
  `paxlite import --base_weights`.
"""


def neutral(found: Mapping[str, Collection[object]]) -> str:
  texts = {name: code(map(json.dumps, values)) for name, values in found.items()}
  return '\n| key | values that are accepted |\n|---|---|\n' + grouped(texts)


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
    TOP, HF,
    harmless(known_keys.HARMLESS), neutral(known_keys.NEUTRAL),
    '\n| key | values |\n|---|---|\n', grouped(quantized),
    ROPE, grouped(kinds), harmless(rope_keys.HARMLESS),
    SOURCES,
    "\n## params.json of Meta\n\n| key | becomes |\n|---|---|\n", grouped(meta.READ),
    harmless(meta.HARMLESS),
  ]  # fmt: skip
  return ''.join(parts)


def test_the_page_shows_the_tables():
  assert PAGE.read_text() == page(), 'python -m tests.rules.test_keys_of_models --update'


if __name__ == '__main__' and '--update' in sys.argv:
  PAGE.write_text(page())
