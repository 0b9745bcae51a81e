"""Pages of HTML: a template of the package whose markers are filled with texts."""

import json
import pathlib
import re
from collections.abc import Mapping

from paxlite.core.json_text import Json


def filled(template: pathlib.Path, parts: Mapping[str, str]) -> str:
  """Returns a template with each marker, <!--name--> or /*name*/, replaced by its part.

  What looks like a marker in a part stays as it is.

  Args:
    template: A file of the package.
    parts: HTML or JavaScript by the names of the markers.
  """
  names = '|'.join(map(re.escape, parts))
  marker = re.compile(rf'<!--({names})-->|/\*({names})\*/')
  text = template.read_text(encoding='utf-8')
  assert {a or b for a, b in marker.findall(text)} == set(parts), f'{template} lacks markers'
  return marker.sub(lambda found: parts[found[1] or found[2]], text)


def script_value(value: Json) -> str:
  """Returns a value as JavaScript that cannot end the script it is in."""
  return json.dumps(value, separators=(',', ':')).replace('<', '\\u003c')
