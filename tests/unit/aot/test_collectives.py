"""Collectives are read off the text of a program, with the mesh axes that they run along."""

from paxlite.aot import collectives
from paxlite.aot.hlo import Program

HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %ag = f32[8,16]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[8]
  %rs = (f32[4]{0}, bf16[2,2]{1,0}) reduce-scatter(%y, %z), replica_groups={{0,2,4,6},{1,3,5,7}}
  %cp = (f32[2]{0}, f32[2]{0}) collective-permute-start(%w), source_target_pairs={{0,2},{2,4}}
  ROOT %next = (s32[], f32[8]) tuple(%j, %x)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %a)
  %loop = (s32[], f32[8]) while(%init), condition=%condition, body=%body
  %3 = (s32[]) while(%i), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %ar = bf16[10]{0} all-reduce(%b), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, to_apply=%add
  %both = f32[10]{0} all-reduce(%b), channel_id=5, replica_groups={}, to_apply=%add
}
"""


def test_collectives_are_read_off_hlo():
  found = collectives.collectives(Program(HLO), {'data': 4, 'mdl': 2})
  by_kind = {}
  for c in found:
    by_kind.setdefault(c.kind, []).append(c)
  gathers = by_kind['all-gather']
  assert [(c.bytes, c.axes, c.size) for c in gathers] == [(512, ('mdl',), 2)] * 2
  assert sorted(c.count for c in gathers) == [3, 5]
  scatter = by_kind['reduce-scatter'][0]  # 4 members: the whole array is 4 times the result
  assert (scatter.bytes, scatter.axes, scatter.size) == ((16 + 8) * 4, ('data',), 4)
  permute = by_kind['collective-permute'][0]
  assert (permute.bytes, permute.axes) == (8, ('data',))
  half, whole = by_kind['all-reduce']
  assert (half.bytes, half.axes, half.size, half.count) == (20, ('data',), 2, 1)
  assert (whole.axes, whole.size) == (('data', 'mdl'), 8)
  assert whole.sent_bytes == 2 * 40 * 7 / 8
