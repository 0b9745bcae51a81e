"""The text of programs: loops, attributes of several lines, shapes."""

import operator
import random
import re

import pytest

from paxlite.aot.hlo import Program, arrays_of, closing, split


def loop(start: str, body: str, condition: str) -> str:
  return f"""HloModule test, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %step = s32[] constant(2)
  {body}
  ROOT %next = (s32[], f32[8]) tuple(%j, %x)
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(9)
  ROOT %go = pred[] {condition}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8] parameter(0)
  %zero = s32[] constant({start})
  %copy = s32[] copy(%zero)
  %init = (s32[], f32[8]) tuple(%copy, %a)
  %loop = (s32[], f32[8]) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8] get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
  ('start', 'body', 'condition', 'trips'),
  [
    ('0', '%j = s32[] add(%i, %step)', 'compare(%i, %limit), direction=LT', 5),
    ('1', '%j = s32[] add(%step, %i)', 'compare(%i, %limit), direction=LT', 4),
    ('1', '%j = s32[] add(%i, %step)', 'compare(%i, %limit), direction=LE', 5),
    ('0', '%j = s32[] add(%i, %step)', 'compare(%limit, %i), direction=GT', 5),
    ('19', '%j = s32[] subtract(%i, %step)', 'compare(%i, %limit), direction=GT', 5),
    ('9', '%j = s32[] add(%i, %step)', 'compare(%i, %limit), direction=LT', 0),
    ('19', '%j = s32[] subtract(%i, %step)', 'compare(%i, %limit), direction=NE', 5),
    ('1', '%j = s32[] add(%i, %step)', 'compare(%i, %limit), direction=NE', 4),
    ('0', '%j = s32[] multiply(%i, %step)', 'compare(%i, %limit), direction=LT', 1),  # not known
    ('0', '%k = s32[] add(%i, %step)\n  %j = s32[] add(%k, %step)',
     'compare(%i, %limit), direction=LT', 3),
  ],
)  # fmt: skip
def test_trips(start, body, condition, trips):
  program = Program(loop(start, body, condition))
  assert program.trips(program.entry, program.entry.instructions['loop']) == trips


ENDS = {'LT': operator.lt, 'LE': operator.le, 'GT': operator.gt, 'GE': operator.ge}


def test_trips_of_drawn_loops():
  """The reader counts as a loop in Python does, whichever way the counter goes."""
  rng = random.Random(0)
  for _ in range(100):
    start, name, way = rng.randint(-30, 30), rng.choice([*ENDS]), rng.choice(['add', 'subtract'])
    if (name in ('LT', 'LE')) == (way == 'subtract'):
      continue  # it would not end
    i, trips = start, 0
    while ENDS[name](i, 9):
      i, trips = i + (2 if way == 'add' else -2), trips + 1
    text = loop(
      str(start), f'%j = s32[] {way}(%i, %step)', f'compare(%i, %limit), direction={name}'
    )
    program = Program(text)
    found = program.trips(program.entry, program.entry.instructions['loop'])
    assert found == trips, (start, way, name)


def test_parts_of_drawn_texts():
  """Texts that are joined are split again, and a bracket is closed where it was."""
  rng = random.Random(1)

  def drawn(depth: int) -> str:
    kind = rng.choice(['a', '"b,(\\""', *(['()', '[]', '{}'] if depth else [])])
    if len(kind) != 2:
      return kind
    return f'{kind[0]}{",".join(drawn(depth - 1) for _ in range(rng.randint(0, 3)))}{kind[1]}'

  for _ in range(200):
    parts = [drawn(4) for _ in range(rng.randint(1, 5))]
    assert split(','.join(parts)) == parts
    inside = f'({":".join(parts)})'
    assert closing(f'x{inside}{drawn(3)}', 1) == len(inside)


@pytest.mark.parametrize('condition', ['%i, %end), direction=LT', '%end, %i), direction=GT'])
@pytest.mark.parametrize(
  ('end', 'trips'),
  [('%end', 4), ('%j', 1), ('%less', 2), ('%part', 1)],
  ids=['kept', 'the counter', 'changed', 'computed anew'],
)
def test_trips_to_a_bound_that_the_loop_carries(condition, end, trips):
  body = """%j = s32[] add(%i, %step)
  %less = s32[] subtract(%end, %step)
  %both = (f32[8], f32[8], s32[]) fusion(%end, %x), kind=kLoop, calls=%f
  %part = s32[] get-tuple-element(%both), index=2"""
  text = loop('1', body, f'compare({condition}')
  text = text.replace('(s32[], f32[8])', '(s32[], f32[8], s32[])')
  text = text.replace('tuple(%copy, %a)', 'tuple(%copy, %a, %nine)')
  text = text.replace('%limit = s32[] constant(9)', '%end = s32[] get-tuple-element(%p), index=2')
  text = text.replace('%copy =', '%nine = s32[] constant(9)\n  %copy =')
  text = re.sub(
    r'ROOT (\S+) = (.*) tuple\(%j, (\S+)\)',
    rf'%end = s32[] get-tuple-element(%p), index=2\n  ROOT \1 = \2 tuple(%j, \3, {end})',
    text,
  )
  program = Program(text)
  assert program.trips(program.entry, program.entry.instructions['loop']) == trips


def test_trips_that_the_compiler_has_noted():
  text = loop('0', '%j = s32[] add(%i, %step)', 'compare(%i, %limit), direction=LT')
  text = text.replace(', body=%body', ', body=%body, backend_config={"known_trip_count":{"n":"7"}}')
  program = Program(text)
  assert program.trips(program.entry, program.entry.instructions['loop']) == 7


KERNEL = """HloModule test

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(256)S(1)} parameter(0)
  %kernel = (f32[8]{0}, bf16[2,4]{1,0:T(2,128)(2,1)}) custom-call(%a), custom_call_target="tpu", \
backend_config={"config": {"body": "
}
%not a computation (x) {
  %nor = f32[8] an-instruction(%a)
}", "n": [1,
2]
}}, frontend_attributes={x="{"}
  ROOT %out = f32[8] get-tuple-element(%kernel), index=0
}
"""


def test_attributes_of_several_lines():
  program = Program(KERNEL)
  assert [i.name for i in program.entry] == ['a', 'kernel', 'out']
  assert program.entry.root.name == 'out'
  kernel = program.entry.instructions['kernel']
  assert (kernel.opcode, kernel.operands) == ('custom-call', ('a',))
  assert [(a.dtype, a.dims, a.space) for a in kernel.arrays] == [
    ('f32', (8,), 0), ('bf16', (2, 4), 0)
  ]  # fmt: skip
  assert program.entry.instructions['a'].arrays[0].space == 1


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match='no entry computation'):
    Program('module @jit_step { }')


def test_shapes():
  assert [a.bytes for a in arrays_of('(f32[2,3]{1,0}, (s4[3]{0}, pred[]), u8[0]{0})')] == [
    24,
    2,
    1,
    0,
  ]
  assert split('f32[2]{0:T(8,128)}, (s32[], s32[]), bf16[1]') == [
    'f32[2]{0:T(8,128)}', '(s32[], s32[])', 'bf16[1]'
  ]  # fmt: skip
