import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.demo import DemoGPT, TinyGPT
from paxlite.experiments.gemma import Gemma3_4B
from paxlite.experiments.glam import GLaM126M64E
from paxlite.experiments.llama import LLaMA3_8B
from paxlite.experiments.qwen_hybrid import Qwen3Next
from paxlite.ladder import sizes
from paxlite.ladder.sizes import Size


def test_a_size_is_read():
  assert Size.parsed('64x2') == Size.parsed(' 64×2 ') == Size(64, 2)
  assert str(Size(64, 2)) == '64x2'


@pytest.mark.parametrize('text', ['64', '64x', 'x2', '0x2', '64x0', '64x2x3', '-64x2', ''])
def test_no_size_is_read_from_other_texts(text):
  with pytest.raises(UserError, match='must be WIDTHxLAYERS'):
    Size.parsed(text)


def test_widths_keep_their_ratios_and_heads_their_width():
  e = LLaMA3_8B()
  values = sizes.values_of(e, Size(1024, 8))
  assert values == dict(
    MODEL_DIMS=1024, NUM_HEADS=8, NUM_KV_HEADS=2, HIDDEN_DIMS=3584, DIMS_PER_HEAD=128, NUM_LAYERS=8
  )
  e.replaced(**values).validate()
  assert sizes.values_of(e, Size.of(e)).items() <= e.values().items()


def test_experts_are_scaled_as_well():
  e = GLaM126M64E()
  values = sizes.values_of(e, Size(e.MODEL_DIMS // 2, 4))
  assert values['EXPERT_HIDDEN_DIMS'] == e.EXPERT_HIDDEN_DIMS // 2


def test_a_width_without_whole_heads_is_refused():
  assert sizes.step_of_widths(Gemma3_4B()) == 640
  with pytest.raises(UserError, match='widths must be multiples of 640'):
    sizes.values_of(Gemma3_4B(), Size(512, 4))


def test_the_rungs_of_an_experiment():
  found = sizes.default_rungs(LLaMA3_8B())
  assert found == [Size(512, 4), Size(1024, 8), Size(1536, 12), Size(2048, 16), Size(3072, 24)]
  found = sizes.default_rungs(DemoGPT(NUM_HEADS=16))
  assert found == [Size(16, 1), Size(32, 1), Size(64, 1), Size(96, 2), Size(192, 3)]
  few_heads = [Size(64, 1), Size(128, 1), Size(128, 2), Size(192, 2), Size(192, 3)]
  assert sizes.default_rungs(DemoGPT()) == few_heads
  with pytest.raises(UserError, match='allow only widths that are multiples of 256'):
    sizes.default_rungs(DemoGPT(NUM_KV_HEADS=1))


def test_widths_that_are_not_known_are_refused():
  sizes.check(TinyGPT())
  sizes.check(GLaM126M64E())
  with pytest.raises(UserError, match='DELTA_KEY_HEADS=16'):
    sizes.check(Qwen3Next())
