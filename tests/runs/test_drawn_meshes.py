"""Drawn models on drawn meshes of 8 devices learn what they learn on one device."""

import json

import pytest

from tests.support import runs


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('draws', [3, 10])
def test_drawn_models_learn_the_same_on_drawn_meshes(draws):
  """Another seed: python -m tests.support.drawn_meshes --seed=N --draws=N."""
  done = runs.module('tests.support.drawn_meshes', '--seed=1', f'--draws={draws}', devices=8)
  results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
  assert len(results) == draws
  for r in results:
    if 'refused' in r:
      assert '\n' not in r['refused']
      continue
    assert r['loss'] < 1e-5, r
    assert r['parameter'] < 1e-4, r
    assert r['bias'] == 0, r
  assert sum('refused' in r for r in results) <= draws // 2
