"""Pipelines give the loss and the gradients of one device, which computes the same microbatches.

The comparison is in float32, to 1e-5 of each gradient's largest entry. How often the collectives of
the compiled programs run shows the number of ticks, and what is sent once a step.
"""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.gpt import GPT126M
from tests.support import runs

DROPOUT = 'DROPOUT_PROB=0.2/EMBEDDING_DROPOUT_PROB=0.1'
REPEATS = 'NUM_PIPELINE_REPEATS=2'
RING = 'CONTEXT_ATTENTION="ring"'

# Each case with its number of ticks.
FAST = {f'gpt/stage=2,data=2/{REPEATS}': 4 * 2 + 1}
PAIRS = {
  'gpt/stage=2,replica=2/USE_LORA=true': 5,
  f'gpt/stage=2,mdl=2/{REPEATS}/SEQUENCE_SHARDED_ACTIVATIONS=true': 9,
  f'moe/stage=2,expert=2/NUM_LAYERS=8/{REPEATS}': 9,
  # with fewer microbatches than stages, stage 0 waits
  f'llama/stage=4,data=2/NUM_LAYERS=8/NUM_MICROBATCHES=2/{REPEATS}': 4 + 2 + 3,
}
TRIPLES = {
  f'gpt/stage=2,data=2,mdl=2/{REPEATS}/GATHER_STAGES_ONCE=false': 9,
  f'llama/stage=2,data=2,context=2/{RING}/{REPEATS}/CHECKPOINT_POLICY="SAVE_EVERYTHING"': 9,
  'dropless/stage=2,data=2,expert=2': 5,
}
FEATURES = {
  f'gpt/stage=2,data=2/{DROPOUT}/{REPEATS}': 9,
  f'gpt/stage=2/{DROPOUT}/NUM_MICROBATCHES=1': 2,
  f'gpt/stage=2,data=2/USE_FP8=true/{REPEATS}': 9,
  f'moe/stage=2,data=2/{DROPOUT}': 5,
  # six stages own two rows, and two own none
  'gpt/stage=8/NUM_LAYERS=8/ROWS=12': 4 + 7,
  # idle stages have finite derivatives
  f'llama/stage=2,data=2/LAYERNORM_EPSILON=0.0/{REPEATS}': 9,
}


def check(cases):
  done = runs.module('tests.support.pipelines', *cases, devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert [r['case'] for r in results] == list(cases)
  for r in results:
    assert r['metrics'] < 1e-5, r
    assert r['gradient'] < 1e-5, r
    # what stages pass on to the next one, forward and backward
    assert max(r['runs']['collective-permute stage']) == cases[r['case']], r
  return results


@pytest.mark.slow
def test_layers_go_around_twice_and_weights_are_gathered_once():
  (result,) = check(FAST)
  assert result['runs']['all-gather data'] == [1]
  assert result['runs']['reduce-scatter data'] == [1]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('cases', [PAIRS, TRIPLES, FEATURES], ids=['pairs', 'triples', 'features'])
def test_a_pipeline_changes_nothing_but_rounding(cases):
  check(cases)


STAGE = dict(
  MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
  DCN_MESH_SHAPE=[1, 1, 1, 1], USE_REPEATED_LAYER=True,
)  # fmt: skip


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (dict(NUM_PIPELINE_REPEATS=4), 'NUM_PIPELINE_REPEATS=4 does not divide the 6 repeated layers'),
    (dict(USE_INT8='forward'), 'int8.*a pipeline .* FP8 included'),
    (dict(USE_TE='gemm'), 'te .*a pipeline .* FP8 included'),
  ],
)
def test_what_cannot_be_in_a_pipeline(changes, message):
  with pytest.raises(UserError, match=message):
    GPT126M(**STAGE | changes).validate()
