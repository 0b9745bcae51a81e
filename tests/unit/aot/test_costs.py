"""What programs do is read from their text: eight small ones, counted by hand.

The programs are those of XLA for one v5e, eight v5e, one H100 and eight H100s (jax 0.10.2), without
their metadata.
"""

import itertools
import pathlib
import random

import pytest

from paxlite.aot import collectives
from paxlite.aot.costs import Costs, host_traffic
from paxlite.aot.flops import convolution_flops
from paxlite.aot.hlo import ArrayShape, Instruction, Program
from paxlite.aot.schedule import COMPUTE, EXPOSED, HOST, MEMORY, Speed, StepSchedule, Timeline
from paxlite.layers.attention import splash_attention

PROGRAMS = pathlib.Path(__file__).parent / 'programs'
MIB = 1 << 20


def costs(name: str) -> Costs:
  text = (PROGRAMS / f'{name}.hlo').read_text()
  return Costs(Program(text), name.split('_')[0])


def timeline(found: Costs, speed: Speed) -> Timeline:
  return StepSchedule(found, speed, {'data': 8}).timeline(found.program.entry)


MATMUL = 2 * 512 * 1024 * 256  # [512, 1024] × [1024, 256]
SCAN = 8 * 2 * 1024**3  # relu(x w) with 8 weights, all [1024, 1024]
GRADIENT = 3 * 8 * 2 * 4096 * 2048**2  # with 8 weights [2048, 2048] for x [4096, 2048]
GATHERED = 2 * 1024 * 4096 * 4096  # a device's eighth of the rows with the whole weight
ATTENTION = 4 * 2 * 8 * 1024**2 * 64 // 2  # 2 rows, 8 heads of 64, 1024 causal positions

# name, FLOPs by type, bytes
COUNTED = [
  # every array once
  ('tpu_matmul', {'bf16': MATMUL}, 2 * (512 * 1024 + 1024 * 256 + 512 * 256)),
  # the first x, all weights and the last x; what lies between stays in VMEM
  ('tpu_scan', {'bf16': SCAN}, 2 * MIB + 8 * 2 * MIB + 2 * MIB),
  # x in and the gradients out; forward: a weight, and x and the mask to keep; backward: x, a
  # weight, and the mask for both products. x is 16 MiB, a mask and a weight are 8 MiB
  ('tpu_scan_gradient', {'bf16': GRADIENT}, (16 + 64 + 8 * 72) * MIB),
  # split along the contracted dimension: eight partial sums in float32 are written and read
  ('gpu_matmul', {'bf16': MATMUL}, 2 * (512 * 1024 + 1024 * 256 + 512 * 256) + 2 * 4 * MIB),
  ('gpu_fp8', {'f8e4m3fn': MATMUL}, 512 * 1024 + 1024 * 256 + 2 * 512 * 256 + 2 * 4 * MIB),
  # four times: a slice of 4 MiB is copied, gathered to 32 MiB, and multiplied with 8 MiB of x; the
  # result is copied. x is copied once before
  ('gpu_gathered_scan', {'bf16': 4 * GATHERED}, (4 * (8 + 36 + 48 + 16) + 16) * MIB),
  ('gpu_attention', {'bf16': ATTENTION}, 4 * 2 * MIB),  # q, k, v and the output
]  # fmt: skip


@pytest.mark.parametrize(('name', 'flops', 'moved'), COUNTED, ids=lambda x: str(x)[:20])
def test_counted_by_hand(name, flops, moved):
  found = costs(name)
  assert found.flops() == flops
  assert 0 <= found.traffic() - moved < 1024  # counters of loops


def test_a_gather_in_a_loop_that_steps_by_two():
  """A weight's eighth of 4 MiB goes both ways round: four permutes in each of two trips."""
  found = costs('tpu_gathered')
  (loop,) = (i for i in found.program.entry if i.opcode == 'while')
  assert found.program.trips(found.program.entry, loop) == 2
  assert found.flops() == {'bf16': GATHERED}
  permutes = collectives.collectives(found.program, {'data': 8})
  assert {(c.kind, c.bytes, c.axes) for c in permutes} == {
    ('collective-permute', 4 * MIB, ('data',))
  }
  assert sum(c.count for c in permutes) == 9


def test_what_nothing_hides_is_exposed():
  """The GPU waits for each gather; of the TPU's nine permutes products hide some."""
  speed = Speed({'': 1e12}, 1e12, lambda c: (c.sent_bytes / 1e11, 0.0))
  found = costs('gpu_gathered_scan')
  line = timeline(found, speed)
  gathers = 4 * 7 / 8 * 32 * MIB / 1e11
  assert line.parts[EXPOSED] == pytest.approx(gathers)
  assert list(line.exposed.values()) == [pytest.approx(gathers)]  # one in a loop of four
  assert line.parts[COMPUTE] == pytest.approx(4 * GATHERED / 1e12)
  others = (4 * (8 + 16) + 16) * MIB / 1e12  # a gather's own 36 MiB take no kernel's time
  assert line.parts[MEMORY] == pytest.approx(others, rel=1e-4)
  assert line.seconds == pytest.approx(gathers + 4 * GATHERED / 1e12 + others, rel=1e-4)

  line = timeline(costs('tpu_gathered'), speed)
  assert 0 < line.parts[EXPOSED] < 9 * 4 * MIB / 1e11 / 2
  assert sum(line.exposed.values()) == pytest.approx(line.parts[EXPOSED])
  assert 0 < len(line.exposed) < 9  # some are hidden as a whole


@pytest.mark.parametrize(('second', 'exposed'), [('data', 8.0), ('mdl', 4.0)])
def test_collectives_share_a_link_or_not(second, exposed):
  """Two gathers of 4 s each, one along `data`: beside one along `mdl`, both links are in use."""
  groups = {'data': '{{0,2},{1,3}}', 'mdl': '{{0,1},{2,3}}'}
  gather = lambda n, axis: (
    f'all-gather-start(%p), channel_id={n}, replica_groups={groups[axis]}, dimensions={{0}}, '
    'use_global_device_ids=true'
  )
  program = Program(f"""HloModule test

ENTRY %main (p: bf16[64]) -> (bf16[128], bf16[128]) {{
  %p = bf16[64] parameter(0)
  %a = (bf16[64], bf16[128]) {gather(1, 'data')}
  %b = (bf16[64], bf16[128]) {gather(2, second)}
  %c = bf16[128] all-gather-done(%a)
  %d = bf16[128] all-gather-done(%b)
  ROOT %t = (bf16[128], bf16[128]) tuple(%c, %d)
}}
""")
  speed = Speed({'': 1.0}, 1e12, lambda c: (4.0, 0.0) if c.axes == ('data',) else (0.0, 4.0))
  line = StepSchedule(Costs(program, 'gpu'), speed, {'data': 2, 'mdl': 2}).timeline(program.entry)
  assert line.parts[EXPOSED] == pytest.approx(exposed)


def test_copies_take_time_and_collectives_take_none_of_their_own():
  """16 bytes are fetched into VMEM and written negated; a gather beside them writes 256 bytes."""
  program = Program("""HloModule test

ENTRY %main (p: f32[4], q: bf16[64]) -> (f32[4], bf16[128]) {
  %p = f32[4] parameter(0)
  %q = bf16[64] parameter(1)
  %g = (bf16[64], bf16[128]) all-gather-start(%q), channel_id=1, replica_groups={{0,1}}, \
dimensions={0}, use_global_device_ids=true
  %c = (f32[4]{0:S(1)}, f32[4], u32[]) copy-start(%p)
  %d = f32[4]{0:S(1)} copy-done(%c)
  %n = f32[4] negate(%d)
  %h = bf16[128] all-gather-done(%g)
  ROOT %t = (f32[4], bf16[128]) tuple(%n, %h)
}
""")
  speed = Speed({'': 1.0}, 1.0, lambda _: (0.0, 0.0))
  costs = Costs(program, 'tpu')
  line = StepSchedule(costs, speed, {'data': 2}).timeline(program.entry)
  assert line.seconds == 16 + 16
  assert costs.traffic() > 256 + 32


def test_a_collective_of_the_sparse_cores_runs_beside_kernels():
  """A scatter of 48 s beside a negation of 32 bytes; it moves nothing of its own."""
  program = Program("""HloModule test

%scatter (a: f32[8]) -> f32[4] {
  %a = f32[8] parameter(0)
  ROOT %r = f32[4] reduce-scatter(%a), channel_id=1, replica_groups={{0,1}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (p: f32[8], q: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[8] parameter(0)
  %q = f32[4] parameter(1)
  %s = ((), (), (s32[64])) custom-call-start(), async_execution_thread="sparsecore", \
custom_call_target="offload", called_computations={%scatter}
  %u = ((f32[8]), f32[4], (s32[64])) custom-call-update(%s, %p)
  %n = f32[4] negate(%q)
  %d = f32[4] custom-call-done(%u)
  ROOT %t = (f32[4], f32[4]) tuple(%n, %d)
}
""")
  costs = Costs(program, 'tpu')
  assert costs.traffic() == 32
  line = StepSchedule(costs, Speed({'': 1.0}, 1.0, lambda _: (48.0, 0.0)), {'data': 2}).timeline(
    program.entry
  )
  assert line.parts[MEMORY] == 32
  assert line.exposed == {'r': 48 - 32}
  (found,) = collectives.collectives(program, {'data': 2})
  assert (found.kind, found.bytes, found.instruction) == ('reduce-scatter', 32, 'r')


def test_a_fusion_beside_others_reads_its_slice_alone():
  """It slices 4 numbers from 64, and writes them into 32 in place."""
  program = Program("""HloModule test

%slice (a: f32[16,4], i: s32[]) -> f32[1,4] {
  %a = f32[16,4] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,4] dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,4}
}

%update (b: f32[8,4], u: f32[1,4], j: s32[]) -> f32[8,4] {
  %b = f32[8,4] parameter(0)
  %u = f32[1,4] parameter(1)
  %j = s32[] parameter(2)
  %y = s32[] constant(0)
  ROOT %d = f32[8,4] dynamic-update-slice(%b, %u, %j, %y)
}

ENTRY %main (p: f32[16,4], q: f32[8,4], k: s32[]) -> f32[8,4] {
  %p = f32[16,4] parameter(0)
  %q = f32[8,4] parameter(1)
  %k = s32[] parameter(2)
  %f = ((f32[16,4], s32[]), f32[1,4], u32[]) fusion-start(%p, %k), kind=kLoop, calls=%slice
  %g = f32[1,4] fusion-done(%f)
  %h = ((f32[8,4], f32[1,4], s32[]), f32[8,4], u32[]) fusion-start(%q, %g, %k), kind=kLoop, \
calls=%update
  ROOT %r = f32[8,4] fusion-done(%h)
}
""")
  # a slice and a number are read, the slice is written; it and a number are read, it is written
  assert Costs(program, 'gpu').traffic() == 4 * (4 + 1 + 4) + 4 * (4 + 1 + 4)


def test_a_product_that_cublas_adds_to_a_sum():
  """[32, 4] × [4, 16] in bfloat16, added to a larger array of float32 in place."""
  program = Program("""HloModule test

ENTRY %main (a: bf16[32,4], b: bf16[4,16], c: f32[32,16]) -> f32[32,16] {
  %a = bf16[32,4] parameter(0)
  %b = bf16[4,16] parameter(1)
  %c = f32[32,16] parameter(2)
  %t = (f32[32,16], s8[4]) custom-call(%a, %b, %c), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %r = f32[32,16] get-tuple-element(%t), index=0
}
""")
  assert Costs(program, 'gpu').flops() == {'bf16': 2 * 32 * 4 * 16}


def test_eight_bits_have_a_peak_of_their_own():
  speed = Speed({'': 1e12, 'f8e4m3fn': 2e12}, 1e15, lambda _: (0.0, 0.0))
  for name, seconds in (('gpu_fp8', MATMUL / 2e12), ('gpu_matmul', MATMUL / 1e12)):
    assert timeline(costs(name), speed).parts[COMPUTE] == pytest.approx(seconds)


def convolution(attributes: str, *dims: tuple[int, ...]) -> float:
  left, right, output = (ArrayShape('bf16', d, 0) for d in dims)
  shape = f'bf16[{",".join(map(str, output.dims))}]'
  return convolution_flops(Instruction('', 'convolution', shape, (), attributes), left, right)


def test_drawn_convolutions():
  """Of one spatial dimension: each product of an element of the input is counted, by a loop."""
  rng = random.Random(0)
  for _ in range(100):
    size, kernel, stride, low, dilate, holes = (rng.randint(1, most) for most in (6, 4, 3, 3, 3, 3))
    low -= 1
    output = rng.randint(1, 8)
    products = 0
    for o, k in itertools.product(range(output), range(kernel)):
      at = o * stride + k * holes - low
      products += 0 <= at <= (size - 1) * dilate and at % dilate == 0
    window = f'size={kernel} stride={stride} pad={low}_{low} lhs_dilate={dilate} rhs_dilate={holes}'
    found = convolution(
      f'window={{{window}}}, dim_labels=b0f_0io->b0f', (2, size, 3), (kernel, 3, 5), (2, output, 5)
    )
    assert found == 2 * 2 * 3 * 5 * products, window


def test_a_batch_dimension_as_a_dimension_of_space():
  """q kᵀ of 4 rows and 32 heads on a TPU: a window meets one element of a dilated input."""
  flops = convolution(
    'window={size=4x32 stride=3x31 lhs_dilate=4x32}, dim_labels=0b1f_0o1i->01bf',
    (4, 2048, 32, 128), (4, 2048, 32, 128), (4, 32, 2048, 2048),
  )  # fmt: skip
  assert flops == 2 * 4 * 32 * 2048 * 2048 * 128


def test_a_contracted_dimension_as_a_window():
  """[4, 2048, 32·128] × [32·128, 512]: the window covers the heads."""
  flops = convolution(
    'window={size=1x2x32 pad=0_0x1_1x0_0 rhs_reversal=0x1x0}, dim_labels=0b2f1_1o2i0->0b1f2',
    (4, 2048, 32, 128, 1), (2, 256, 32, 128, 1), (4, 2048, 2, 256, 1),
  )  # fmt: skip
  assert flops == 2 * 4 * 2048 * 32 * 128 * 512


@pytest.mark.parametrize(
  ('kernel', 'widths'), [('fwd', 64 + 32), ('dq', 2 * 64 + 32), ('dkv', 2 * 64 + 2 * 32)]
)
@pytest.mark.parametrize(('scope', 'share'), [('causal', 1), (splash_attention.EVERY_KEY, 2)])
def test_splash_states_no_cost(kernel, widths, scope, share):
  """Two rows, 8 heads of 64 with 2 heads of keys, values of 32, 1024 positions."""
  call = f'custom-call(%m, %m, %q, %k, %v), metadata={{op_name="jit(step)/{scope}/vmap()"}}'
  text = f"""HloModule test

ENTRY %main (q: bf16[2,8,1024,64], k: bf16[2,2,1024,64], v: bf16[2,2,1024,32], m: s8[1,2,2]) -> \
bf16[2,8,1024,64] {{
  %q = bf16[2,8,1024,64] parameter(0)
  %k = bf16[2,2,1024,64] parameter(1)
  %v = bf16[2,2,1024,32] parameter(2)
  %m = s8[1,2,2] parameter(3)
  ROOT %splash_mha_{kernel}_segmented.1 = bf16[2,8,1024,64] {call}
}}
"""
  assert Costs(Program(text), 'tpu').flops() == {'bf16': share * widths * 2 * 8 * 1024 * 1024}


def test_padding_and_strides_are_left_out():
  flops = convolution(
    'window={size=3 stride=2 pad=1_1}, dim_labels=b0f_0io->b0f', (1, 8, 1), (3, 1, 1), (1, 4, 1)
  )
  assert flops == 2 * (3 * 4 - 1)  # the first window begins before the input


STREAMED = """HloModule streamed, is_scheduled=true

ENTRY %main (m: f32[4,1024], i: s32[], x: f32[512]) -> (f32[4,1024], f32[512]) {
  %m = f32[4,1024]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[512]{0} parameter(2)
  %zero = s32[] constant(0)
  %read = ((f32[4,1024]{1,0:S(5)}, s32[], s32[]), f32[1,1024]{1,0}, u32[]) fusion-start(%m, %i, %zero)
  %slice = f32[1,1024]{1,0} fusion-done(%read)
  %write = ((f32[4,1024]{1,0:S(5)}, f32[1,1024]{1,0}, s32[], s32[]), f32[4,1024]{1,0:S(5)}, u32[]) fusion-start(%m, %slice, %i, %zero)
  %out = (f32[512]{0:S(5)}, f32[512]{0}, u32[]) copy-start(%x)
  %new = f32[4,1024]{1,0:S(5)} fusion-done(%write)
  %kept = f32[512]{0:S(5)} copy-done(%out)
  ROOT %both = (f32[4,1024]{1,0:S(5)}, f32[512]{0:S(5)}) tuple(%new, %kept)
}
"""  # noqa: E501


def test_copies_from_and_to_the_host_are_counted():
  """A slice of 4 kB is read, then 4 kB and 2 kB are written; at 1 kB/s the ways take turns."""
  found = Costs(Program(STREAMED), 'gpu')
  assert host_traffic(found) == (4096, 4096 + 2048)
  speed = Speed({'': 1.0}, 1e30, lambda _: 0.0, host=1024.0)
  line = timeline(found, speed)
  assert line.parts[HOST] == pytest.approx(4 + 4 + 2)
  assert line.seconds == pytest.approx(10)


def test_waits_for_copies_count_as_often_as_a_loop_runs():
  line, inner = Timeline(), Timeline()
  inner.parts |= {EXPOSED: 1.0, HOST: 2.0}
  line.add(inner, 3)
  assert (line.parts[HOST], line.seconds) == (6.0, 9.0)
