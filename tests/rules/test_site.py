"""The site of docs/ builds without a warning, and its search needs no network."""

import re
import subprocess
import sys

import pytest

from paxlite.tools import listings
from paxlite.weights.family_tables import FAMILIES
from tests.support import runs


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
  site = tmp_path / 'site'
  built = subprocess.run(
    [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', 'docs', str(site)],
    cwd=runs.ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (built.returncode, built.stderr) == (0, '')
  pages = {
    p.relative_to(runs.ROOT / 'docs').with_suffix('') for p in (runs.ROOT / 'docs').rglob('*.md')
  }
  assert {p.relative_to(site).with_suffix('') for p in site.rglob('*.html')} >= pages
  index = (site / 'searchindex.js').read_text()
  assert all(word in index for word in ('goodput', 'hold', 'tutorials/own_text'))
  families = (site / 'weights.html').read_text()
  assert [name for name in FAMILIES if name not in families] == []
  listed = (site / 'attributes.html').read_text()
  assert [a['name'] for a in listings.attributes() if a['name'] not in listed] == []
  loaded = re.findall(
    r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]*)"', (site / 'index.html').read_text()
  )
  assert loaded == [], 'every page works offline'
  listed = (site / 'llms.txt').read_text()
  entries = re.findall(r'^- \[.+\]\((.+)\.html\): \S.+$', listed, re.MULTILINE)
  assert len(entries) == len(set(entries))
  assert {str(page) for page in pages} == {*entries, 'index'}, 'each page with a sentence about it'
