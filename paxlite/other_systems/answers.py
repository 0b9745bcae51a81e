"""Answers to a user who gives a name of another library: a flag, an attribute, a class, a variable.

The tables are in names_of_<library>.json. other_names.py looks names up in them, and the pages
docs/migrating_from_*.md show them. The names are those of

- Pax: paxml's main.py, tasks/lm/model_params.py, tasks/lm/params/c4.py and contrib/gpu/scripts_gpu
  with the variables that its scripts set or read; CONVERT_TE has the flags of JAX-Toolbox's
  te_pax_t5x_ckpt_converter, and CONVERT_LLAMA those of saxml's convert_llama_ckpt.py, whose older
  versions have the long names;
- MaxText: base.yml; CONVERT_LLAMA has the flags of its convert_llama_ckpt.py;
- transformers: TrainingArguments and example scripts;
- TRL: SFTConfig and what TRL's scripts add to it; DPOConfig, ORPOConfig and CPOConfig; PEFT's
  LoraConfig with and without the prefix of TRL's scripts; and Axolotl's YAML files. Unsloth takes
  the arguments of the first two;
- seqax: its configs.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Literal

from paxlite.core.json_text import parsed

Names = Mapping[str, 'Answer']
Kind = Literal['same', 'renamed', 'instead', 'needless', 'absent']
Accepted = Literal['', 'false', 'any']


@dataclasses.dataclass(frozen=True)
class Answer:
  """The paxlite equivalent of a name in another library."""

  # whether paxlite has this name, has another one for it, does the same in another way, needs none,
  # or has nothing like it
  kind: Kind
  target: str = ''  # the name in paxlite, of kind 'renamed'
  text: str = ''  # an explanation, the way to do it here, or the reason, without a full stop
  # the values with which a flag of Pax's main is accepted: none, false, or any
  accepted: Accepted = ''

  def sentence(self) -> str:
    """Returns the answer as the end of a message; '' if there is nothing to say."""
    if self.kind == 'renamed':
      note = f' ({self.text})' if self.text else ''
      return f'It is {self.target} here{note}.'
    start = {'needless': 'Leave it out: ', 'absent': 'Not supported: '}
    return f'{start.get(self.kind, "")}{self.text}.' if self.text else ''


@functools.cache
def names_of(library: str) -> dict[str, Names]:
  """Returns the tables of a library by their names.

  A row of its file has names, which blanks separate, and the fields of the Answer for them.
  """
  text = pathlib.Path(__file__).with_name(f'names_of_{library}.json').read_text('utf-8')
  return {
    table: {name: Answer(*fields) for names, fields in rows.items() for name in names.split()}
    for table, rows in parsed(text).items()
  }
