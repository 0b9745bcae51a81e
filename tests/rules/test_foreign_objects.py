"""Objects of strangers are read through core.fields, which says what nobody has read."""

import ast
import pathlib

import pytest

PAXLITE = pathlib.Path(__file__).parents[2] / 'paxlite'

# Modules that take values out of records, requests and settings of others.
READERS = (
  'chats/conversations.py', 'finetuning/preferences/labelled_answers.py',
  'finetuning/chats/sft_warnings.py', 'finetuning/preferences/preference_rows.py',
  'finetuning/chats/sft.py', 'chats/sft_formats.py', 'eval/decoding.py',
  'finetuning/reinforcement/prompts.py', 'serving/bodies.py', 'serving/fields.py',
  'eval/commands/lm_eval.py', 'weights/known_keys.py', 'weights/meta.py', 'weights/packed_int4.py',
  'training_api/api.py',
)  # fmt: skip
# What has been read, or is only looked at: names that stand for it.
ELSE = {
  'chats/conversations.py': {
    'm': 'tells messages from other lists', 'message': 'a message that is read, or its role',
    'tool': 'a tool, which templates get as a whole', 'function': 'of such a tool',
  },
  'chats/sft_formats.py': {'m': 'a message that is read'},
  'finetuning/chats/sft_warnings.py': {'m': 'a message that is read'},
  'weights/meta.py': {'params': 'all of it is what Fields gave'},
}  # fmt: skip
MAKERS = ('Fields', 'ObjectFields', 'object', '_inner')  # what returns Fields


def names_of_fields(function: ast.AST) -> set[str]:
  """Returns the names in a function that stand for Fields."""
  found = set()
  for node in ast.walk(function):
    if isinstance(node, ast.arg) and node.annotation and 'Fields' in ast.unparse(node.annotation):
      found.add(node.arg)
    if isinstance(node, ast.Assign | ast.NamedExpr) and isinstance(node.value, ast.expr):
      made = [n.func for n in ast.walk(node.value) if isinstance(n, ast.Call)]
      if any(getattr(f, 'id', getattr(f, 'attr', '')) in MAKERS for f in made):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
  return found


def unseen_reads(source: str) -> list[str]:
  """Returns the calls .get('key') of objects that are no Fields, with their lines."""
  wrong = []
  for function in ast.parse(source).body:
    known = names_of_fields(function)
    for node in ast.walk(function):
      if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        continue
      is_key = bool(node.args) and isinstance(node.args[0], ast.Constant)
      if node.func.attr == 'get' and is_key and isinstance(node.args[0].value, str):
        base = ast.unparse(node.func.value)
        if base not in known and not base.startswith(('Fields(', 'super(', 'os.environ')):
          wrong.append(f'{node.lineno}: {ast.unparse(node)}')
  return wrong


@pytest.mark.parametrize('name', READERS)
def test_keys_of_strangers_are_read_through_fields(name):
  wrong = unseen_reads((PAXLITE / name).read_text())
  allowed = {base: [w for w in wrong if f': {base}.get(' in w] for base in ELSE.get(name, ())}
  assert [base for base, found in allowed.items() if not found] == []  # what nobody needs any more
  assert [w for w in wrong if not any(w in found for found in allowed.values())] == []


def test_the_rule_finds_a_read_that_nobody_sees():
  assert unseen_reads("def f(record):\n  return record.get('weight')") == [
    "2: record.get('weight')"
  ]
  assert unseen_reads("def f(record: Fields):\n  return record.get('weight')") == []
  assert unseen_reads("def f(x):\n  y = Fields(x)\n  return y.get('a') or x.get('b')") == [
    "3: x.get('b')"
  ]
