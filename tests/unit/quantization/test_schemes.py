"""Weights that are quantized."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.quantization.schemes import Int8, QuantizationScheme, register_scheme, scheme_named
from tests.support import runs
from tests.support.frozen_forms import compare

VALUES = dict(FROZEN_DTYPE='int8', FPROP_DTYPE='float32', NUM_LAYERS=1)


@pytest.mark.slow
def test_gradients_are_those_of_the_decoded_weights_in_float32():
  found = compare(**VALUES)
  assert found['error'] < 1e-5
  assert found['losses'][0] == pytest.approx(found['losses'][1], rel=1e-6)
  assert len(found['arrays']) == 2 * 4  # values and scales of four projections


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('repeated', [False, True])
def test_gradients_on_a_mesh_of_eight(repeated):
  words = [f'{k}={v}' for k, v in VALUES.items() if k != 'NUM_LAYERS']
  words += ['ICI_MESH_SHAPE=[2,2,2]', f'USE_REPEATED_LAYER={repeated}']
  done = runs.module('tests.support.frozen_forms', *words, devices=8)
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['error'] < 1e-5
  split = {tuple(name.split('/')[-3:]): spec for name, spec in found['arrays'].items()}
  layers = 'None, ' if repeated else ''
  assert split['ffn_layer1', 'w', 'values'] == f"P({layers}'data', 'mdl')"
  assert split['ffn_layer1', 'w', 'scale'] == f"P({layers}None, 'mdl')"


def test_what_is_no_form_and_what_a_form_cannot():
  for values, match in (
    (dict(FROZEN_DTYPE='int3'), r'FROZEN_DTYPE=int3 must be one of float32, bfloat16, .*int8'),
    (dict(FROZEN_DTYPE='int8', USE_FP8=True), 'FROZEN_DTYPE=int8 is for plain XLA'),
  ):
    with pytest.raises(UserError, match=match):
      TinyGPT(USE_LORA=True, **values).validate()
  with pytest.raises(
    UserError, match='bfloat16 is a dtype or another scheme: give QuantizationScheme'
  ):
    register_scheme('bfloat16')(QuantizationScheme)
  assert scheme_named('int8') is Int8
  assert scheme_named('float32') is None
