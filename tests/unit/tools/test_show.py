"""Meanings of attributes come from the comments at their declarations."""

import pytest

from paxlite.config.attributes import attribute_types
from paxlite.experiments.registry import experiments
from paxlite.tools import show


@pytest.mark.parametrize(
  ('code', 'meaning'),
  [
    ('X: int = 3  # steps', 'steps'),
    ('X: int = 3  # type: ignore[assignment]', ''),
    ('X: int = 3  # type: ignore[assignment]  # steps', 'steps'),
    ('X: int = 3  # noqa: E501', ''),
    ('X: int = (\n  3  # steps of a run\n)', 'steps of a run'),
  ],
)
def test_a_comment_for_tools_is_no_meaning(code, meaning):
  assert show._comment(code) == meaning


def test_every_attribute_has_a_meaning_for_people():
  for cls in experiments().values():
    meanings = show.meanings(cls.declaring())
    assert not [n for n in attribute_types(cls) if 'ignore[' in meanings.get(n, '')]


@pytest.mark.parametrize('columns', [60, 80])
def test_meanings_fit_a_narrow_terminal(capsys, monkeypatch, columns):
  monkeypatch.setenv('COLUMNS', str(columns))
  show.main(['TinyGPT'])
  lines = [line for line in capsys.readouterr().out.splitlines() if '# ' in line]
  assert max(map(len, lines)) <= columns
  assert any(line.startswith('    # ') for line in lines)
