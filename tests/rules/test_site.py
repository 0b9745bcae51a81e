"""The site of docs/ builds without a warning, and works from files, on narrow windows too."""

import re
import subprocess
import sys

import pytest

from paxlite.tools import listings
from paxlite.weights.family_tables import FAMILIES
from tests.support import runs
from tests.support.browser import PROGRAM, browser


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  site = tmp_path_factory.mktemp('site')
  built = subprocess.run(
    [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', 'docs', str(site)],
    cwd=runs.ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (built.returncode, built.stderr) == (0, '')
  return site


@pytest.mark.slow
def test_the_site_has_all_pages(site):
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


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason='needs Chromium')
def test_pages_fit_their_window_and_the_search_shows_excerpts(site, tmp_path):
  with browser(tmp_path) as b:
    for width in (400, 1400):
      b.look(width)
      for page in sorted(site.rglob('*.html')):
        b.open(page.as_uri())
        wide = b.run('document.documentElement.scrollWidth - document.documentElement.clientWidth')
        assert wide == 0, (width, page)
        cut = b.run(
          '[...document.querySelectorAll(".highlight-sh pre")]'
          '.filter(p => p.scrollWidth > p.clientWidth).length'
        )
        assert cut == 0, (width, page)
    b.open((site / 'fine_tuning.html').as_uri())
    commands = b.run('document.querySelector(".highlight-sh pre").innerText').splitlines()
    source = (runs.ROOT / 'docs' / 'fine_tuning.md').read_text()
    assert [line for line in commands if line not in source] == [], (
      'a copy has the lines as written'
    )
    b.open((site / 'search.html').as_uri() + '?q=checkpoint')
    found = b.until(
      '[...document.querySelectorAll("#search-results .context")].map(e => e.innerText)'
    )
    b.until('document.querySelectorAll("#search-results .context").length > 10')
    assert all('checkpoint' in text.lower() for text in found)
    assert b.problems == []
