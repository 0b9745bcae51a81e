"""Runs a few cases of tests.support.fuzz: random input is read rightly or refused clearly."""

import pytest

for package in ('hypothesis', 'jinja2', 'safetensors', 'tokenizers'):
  pytest.importorskip(package)

from tests.support import fuzzing  # noqa: E402


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('target', fuzzing.TARGETS)
def test_right_results_or_clear_errors(target):
  right, refused = fuzzing.run(target, cases=20)
  assert right
  assert refused
