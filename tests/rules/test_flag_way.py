"""The value of a flag goes through few files: tests/support/flag_way.py follows it."""

import json
import re

import pytest

from tests.support import runs

MOST = 12
TEXTS = {'LEARNING_RATE': '0.00123457', 'NUM_LAYERS': '211'}
PROGRAMS = {
  'paxlite.main': ('--fdl_config=TinyGPT', '--job_log_dir=FOLDER'),
  'paxlite': ('train', 'TinyGPT', '--folder=FOLDER'),
}


@pytest.mark.cases(fast=2, slow=2)
@pytest.mark.parametrize('program', PROGRAMS)
@pytest.mark.parametrize('name', TEXTS)
def test_the_way_is_short_and_is_that_of_the_map(name, program, tmp_path):
  """The list of docs/architecture.md names every file on the way, and no other."""
  given = [word.replace('FOLDER', str(tmp_path / 'run')) for word in PROGRAMS[program]]
  words = [name, TEXTS[name], program, *given, f'--fdl.{name}={TEXTS[name]}']
  done = runs.module('tests.support.flag_way', *words)
  found = set(json.loads(next(x for x in done.stdout.splitlines() if x.startswith('["'))))
  assert len(found) <= MOST, sorted(found)
  page = (runs.ROOT / 'docs/architecture.md').read_text()
  rows = re.findall(r'^\d+\. .*', page.split('## Life of a flag\n')[1].split('\n## ')[0], re.M)
  others = {*TEXTS} - {name} | ({'`paxlite train`'} if program == 'paxlite.main' else set())
  mine = [row for row in rows if not any(other in row.split(':')[0] for other in others)]
  assert {re.findall(r'`([\w/]+\.py)`', row)[0] for row in mine} == found
