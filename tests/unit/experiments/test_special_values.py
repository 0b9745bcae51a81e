"""Values at the edge of a range: one that a meaning names is taken, and others may be refused."""

import ast
import re

import pytest

from paxlite.config.attribute_kinds import OffAtZero, OffAtZeroInt
from paxlite.config.attributes import attribute_types
from paxlite.core.errors import UserError
from paxlite.experiments import datasets
from paxlite.experiments.deepseek import DeepSeekV3_671B
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import configs_text
from paxlite.experiments.gemma import Gemma3
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.llama import LLaMA
from paxlite.tools import show

MODELS = [TinyGPT, GLaM126M64E, DeepSeekV3_671B, Gemma3]
DATA = [
  type(f'Tiny{mixin.__name__}', (mixin, TinyGPT), values)
  for mixin, values in [
    (datasets.TextFiles, dict(TRAIN_FILES=['a.txt'])),
    (datasets.FlatTokens, dict(DATASET_PATH='flat')),
    (datasets.DocumentFiles, dict(TRAIN_SOURCES=['a.jsonl'])),
    (datasets.SftFiles, dict(TRAIN_FILES=['a.jsonl'])),
    (datasets.Mixture, dict(SOURCES=['a.jsonl', 'b.txt'], WEIGHTS=[1.0, 2.0])),
  ]
]
# a value and a colon, at the beginning or after a mark: '0: off', "'': the tokenizer's"
_NAMED = re.compile(r"(?:^|[;,] )(≤ 0|empty|-?\d+|''|\[\]|None): ")
_MEANT = {'≤ 0': [0, -1], 'empty': [[]]}


def named_values(cls):
  """Returns the attributes and values that the meanings or the types of a class name."""
  meanings, found = show.meanings(cls.declaring()), {}
  for name, annotation in attribute_types(cls).items():
    for text in _NAMED.findall(meanings.get(name, '')):
      found |= {
        (name, repr(value)): value for value in _MEANT.get(text) or [ast.literal_eval(text)]
      }
    if any(rule in str(annotation) for rule in map(str, (OffAtZero, OffAtZeroInt))):
      found[name, '0'] = 0
  return [(name, value) for (name, _), value in found.items()]


@pytest.mark.cases(fast=1, slow=3)
@pytest.mark.parametrize('cls', [*MODELS, *DATA], ids=lambda cls: cls.__name__)
def test_a_value_that_a_meaning_names_is_taken(cls):
  named = named_values(cls)
  assert len(named) > 10
  for name, value in named:
    if name == 'SLIDING_WINDOW' and cls.ATTENTION_PATTERN:
      continue  # blocks with a window need one
    made = cls(**{name: value})
    made.validate()
    assert configs_text(made), name


def test_no_document_is_held_out_where_none_is_to_be():
  for cls in DATA[2], DATA[4]:
    assert 'held_out' in ''.join(cls().eval_inputs())
    made = cls(HELD_OUT_EVERY=0)
    assert not made.eval_inputs()
    assert "split = 'train'" not in configs_text(made)


@pytest.mark.parametrize(
  ('cls', 'values', 'message'),
  [
    (TinyGPT, dict(SLIDING_WINDOW=-1), 'SLIDING_WINDOW=-1 must not be negative'),
    (TinyGPT, dict(LOSS_SPIKE_FACTOR=-1.0), 'LOSS_SPIKE_FACTOR=-1 must not be negative'),
    (TinyGPT, dict(INIT_STD=-0.1), 'INIT_STD=-0.1 must not be negative'),
    (TinyGPT, dict(LAYERNORM_EPSILON=-1e-6), 'LAYERNORM_EPSILON=-1e-06 must not be negative'),
    (TinyGPT, dict(START_ID=-1), 'START_ID=-1 must not be negative'),
    (TinyGPT, dict(START_ID=10**6), 'START_ID=1000000 is not a token id'),
    (LLaMA, dict(ROPE_THETA=0.0), 'ROPE_THETA=0 must be above 0'),
    (LLaMA, dict(ROPE_THETA=1.0, ROPE_FACTOR=2.0, ROPE_SCALING='yarn'), 'ROPE_THETA.* above 1'),
    (LLaMA, dict(ROPE_FRACTION=0.0), 'ROPE_FRACTION=0, above 0, not 0'),
    (LLaMA, dict(ROPE_ORIGINAL_LENGTH=0), 'ROPE_ORIGINAL_LENGTH=0 must be at least 1'),
    (
      LLaMA,
      dict(ROPE_FACTOR=2.0, ROPE_SCALING='longrope', ROPE_SHORT_FACTORS=[0.0] * 64,
           ROPE_LONG_FACTORS=[1.0] * 64),
      'ROPE_LONG_FACTORS above 0',
    ),
    (DeepSeekV3_671B, dict(ROPE_FRACTION=0.5), 'ROTARY_DIMS_PER_HEAD is what rotates'),
    (GLaM126M64E, dict(RELATIVE_BIAS_BUCKETS=1), 'RELATIVE_BIAS_BUCKETS=1 must be at least 2'),
    (GLaM126M64E, dict(RELATIVE_BIAS_MAX_DISTANCE=16), 'must be more than half of'),
    (GLaM126M64E, dict(AUX_LOSS_COEF=-0.1), 'AUX_LOSS_COEF=-0.1 must not be negative'),
  ],
)  # fmt: skip
def test_what_would_not_be_a_number_or_mean_nothing_is_refused(cls, values, message):
  with pytest.raises(UserError, match=message):
    cls(**values).validate()


@pytest.mark.parametrize(
  ('cls', 'values', 'said'),
  [
    (TinyGPT, dict(LORA_RANK=4), ['LORA_RANK=4']),
    (TinyGPT, dict(LORA_RANK=4, USE_LORA=True), []),
    (TinyGPT, dict(ROPE_FACTOR=2.0), ['ROPE_FACTOR=2.0']),
    (LLaMA, dict(ROPE_BETA_FAST=3.0, ROPE_FACTOR=2.0), ['ROPE_BETA_FAST=3.0']),
    (DeepSeekV3_671B, dict(NUM_KV_HEADS=2), ['NUM_KV_HEADS=2']),
    (DeepSeekV3_671B, dict(QK_NORM='per_head'), ["QK_NORM='per_head'"]),
    (GLaM126M64E, dict(ROUTER_BIAS_RATE=0.1), ['ROUTER_BIAS_RATE=0.1']),
    (TinyGPT, dict(BEST_METRIC='acc', LOSS_SPIKE_WINDOW=5),
     ["BEST_METRIC='acc'", 'LOSS_SPIKE_WINDOW=5']),
    (TinyGPT, dict(BEST_METRIC='acc', KEEP_BEST=True, LOSS_SPIKE_FACTOR=2.0, MAX_ROLLBACKS=1), []),
    (TinyGPT, dict(GATHER_STAGES_ONCE=False, FROZEN_DTYPE='bfloat16', MAX_EVAL_BATCHES=1),
     ['GATHER_STAGES_ONCE=False', "FROZEN_DTYPE='bfloat16'", 'MAX_EVAL_BATCHES=1']),
    (TinyGPT, dict(SEED=3, MAX_SEQ_LEN=32, HEADS_SPAN_MODEL=False, MODEL_DIMS=128), []),
  ],
)  # fmt: skip
def test_a_value_that_changes_nothing_is_said(cls, values, said):
  made = cls(**values)
  made.validate()
  found = [r for r in made.warnings if 'changes nothing' in r]
  assert sorted(r.partition(' ')[0] for r in found) == sorted(said)
