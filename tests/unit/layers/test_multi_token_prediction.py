"""Modules that predict further tokens: their place in the model, and their loss."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from paxlite.core.errors import UserError
from paxlite.experiments.compatibility import differences, function_lines
from paxlite.experiments.finetuning import HuggingFacePreferences
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.finetuning.distillation.experiment import Distillation
from paxlite.finetuning.preferences.reward_model import RewardModel
from paxlite.layers.multi_token_prediction import following

V, T = 61, 12
SMALL = dict(
  NUM_LAYERS=2, MODEL_DIMS=32, NUM_HEADS=4, NUM_KV_HEADS=2, HIDDEN_DIMS=48, VOCAB_SIZE=V,
  MAX_SEQ_LEN=T, FPROP_DTYPE='float32', ICI_MESH_SHAPE=[1, 1, 1], DCN_MESH_SHAPE=[1, 1, 1],
  NUM_PREDICTION_MODULES=2, PERCORE_BATCH_SIZE=4, USE_REPEATED_LAYER=False,
)  # fmt: skip


def make(cls=LLaMA, **values):
  experiment = cls(**SMALL | values)
  experiment.validate()
  return fdl.build(experiment.build_task())


def params_of(task):
  """Returns random parameters, of which none is 0 or 1 everywhere."""
  shapes = meta.unbox(jax.eval_shape(task.init_params, jax.random.key(0)))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes)


def batch_of(rows=4, seed=0):
  """Returns packed rows: segments of 5 and 4 tokens, and padding."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, V, (rows, T + 1)).astype(np.int32)
  segments = np.repeat([[1] * 5 + [2] * 4 + [0] * 3], rows, 0).astype(np.int32)
  weights = (rng.random((rows, T)) < 0.8) * (segments > 0)
  positions = np.repeat([[*range(5), *range(4), *range(3)]], rows, 0).astype(np.int32)
  return dict(
    ids=tokens[:, :-1], labels=tokens[:, 1:], weights=weights.astype(np.float32),
    segment_ids=segments, segment_pos=positions,
  )  # fmt: skip


def results(task, params, batch):
  """Returns gradients and metrics of a step."""
  grads, _, metrics = jax.jit(lambda p, b: task.grads(p, b, None))(params, batch)
  return grads, metrics


def assert_close(ours, theirs, tolerance=1e-5):
  def check(path, a, b):
    name, scale = jax.tree_util.keystr(path), np.abs(b).max() + 1e-9
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=name)

  jax.tree_util.tree_map_with_path(check, ours, theirs)


def test_what_follows_is_in_the_same_segment():
  values = jnp.arange(1, 9)[None]
  segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
  later, exists = following(values, 1, segments)
  assert later.tolist() == [[2, 3, 0, 5, 0, 0, 0, 0]]
  assert exists.tolist() == [[True, True, False, True, False, False, False, False]]
  assert following(values, 2, segments)[0].tolist() == [[3, 0, 0, 0, 0, 0, 0, 0]]
  assert following(values, 2, None)[0].tolist() == [[3, 4, 5, 6, 7, 8, 0, 0]]
  assert not following(values, 9, None)[1].any()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_model_itself_does_not_change():
  """Neither its initial values nor its loss, bit for bit, nor what its weights are checked for."""
  one = dict(NUM_LAYERS=1)
  plain, task = make(**one, NUM_PREDICTION_MODULES=0), make(**one, NUM_PREDICTION_MODULES=1)
  before, after = (meta.unbox(jax.jit(t.init_params)(jax.random.key(3))) for t in (plain, task))
  assert {k for k in after if k not in before} == {'predictions_0'}
  trunk = {k: after[k] for k in before}
  jax.tree.map(np.testing.assert_array_equal, trunk, before)
  batch = batch_of()
  found = [jax.jit(t.loss_and_metrics)(p, batch)[1] for t, p in ((plain, before), (task, after))]
  for name, metric in found[0].items():
    if name != 'total_loss':
      assert metric.value == found[1][name].value, name
  lines = [function_lines(LLaMA(**SMALL | v).model()) for v in (dict(NUM_PREDICTION_MODULES=0), {})]
  assert not differences(*lines)


def test_packed_rows_are_as_each_text_alone():
  """No module reads a token behind the end of a segment, or is asked for one."""
  task, batch = make(NUM_LAYERS=1), batch_of()
  params, names = params_of(task), ('mtp_1_xent', 'mtp_2_xent')
  compiled = jax.jit(task.loss_and_metrics).lower(params, batch).compile()
  loss, whole = compiled(params, batch)
  sums, weights = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
  for cut, length in ((slice(0, 5), 5), (slice(5, 9), 4)):
    alone = {k: np.zeros_like(x) for k, x in batch.items()}
    for name, x in alone.items():
      x[:, :length] = batch[name][:, cut]
    _, metrics = compiled(params, alone)
    for name in names:
      sums[name] += float(metrics[name].value * metrics[name].weight)
      weights[name] += float(metrics[name].weight)
  for i, name in enumerate(names, 1):
    counted = batch['weights'][:, i:5].sum() + batch['weights'][:, 5 + i : 9].sum()
    assert float(whole[name].weight) == weights[name] == counted
    assert float(whole[name].value) == pytest.approx(sums[name] / weights[name], rel=1e-5)
  # other tokens of the padding change nothing
  other = {k: v.copy() for k, v in batch.items()}
  other['ids'][:, 9:] = 7
  other['labels'][:, 9:] = 7
  assert float(compiled(params, other)[0]) == pytest.approx(float(loss), rel=1e-6)


EXPERTS = dict(
  NUM_EXPERTS=4, BLOCKS_PER_LAYER=1, USE_DROPLESS_MOE=True, AUX_LOSS_COEF=0.0, NUM_MOE_GROUPS=1
)  # fmt: skip
VARIANTS = {
  'microbatches': dict(NUM_MICROBATCHES=2),
  'repeated, recomputed, chunks': dict(
    USE_REPEATED_LAYER=True, CHECKPOINT_POLICY='SAVE_NOTHING', NUM_LOSS_CHUNKS=3
  ),
}


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('cls', [LLaMA, MixtureOfExperts])
def test_variants_give_the_same_loss_and_gradients(cls, variant):
  """The microbatches have unequal numbers of targets."""
  values = EXPERTS if cls is MixtureOfExperts else {}
  base = make(cls, **values, CHECKPOINT_POLICY='SAVE_EVERYTHING')
  params, batch = params_of(base), batch_of()
  batch['weights'][2:, 2:] = 0
  expected, one = results(base, params, batch)
  task = make(cls, **values | VARIANTS[variant])
  if 'repeated' in variant:
    stack = lambda tree: {
      **tree,
      'transformer': {
        'repeat': jax.tree.map(lambda *x: jnp.stack(x), *tree['transformer'].values())
      },
    }
    params, expected = stack(params), stack(expected)
  grads, metrics = results(task, params, batch)
  for name in ('total_loss', 'mtp_1_xent', 'mtp_2_xent', 'fraction_of_correct_mtp_1'):
    assert float(metrics[name].value) == pytest.approx(float(one[name].value), rel=1e-5), name
    assert metrics[name].weight == one[name].weight
  assert_close(grads, expected)
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grads['predictions_1']))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gradients_in_bfloat16():
  """The shared embedding and the shared head have one gradient each, of all that read them."""
  task = make(FPROP_DTYPE='bfloat16', GRADIENT_DTYPE='bfloat16')
  params, batch = params_of(task), batch_of()
  expected, _ = results(make(), params, batch)
  grads, metrics = results(task, params, batch)
  assert np.isfinite(metrics['total_loss'].value)
  assert_close(grads, expected, 0.1)


class Distilled(Distillation, LLaMA):
  """Trained with a teacher."""


def test_the_weight_is_that_of_the_mean_over_modules():
  task = make(PREDICTION_LOSS_WEIGHT=0.1)
  assert list(task.losses) == ['avg_xent', 'mtp_1_xent', 'mtp_2_xent', 'aux_loss']
  assert task.losses['mtp_2_xent'].coefficient == 0.05
  assert not task.larger_is_better('mtp_1_xent')
  assert task.larger_is_better('fraction_of_correct_mtp_1')


def test_beside_a_teacher_its_share_is_that_of_the_cross_entropy():
  experiment = Distilled(**SMALL, TEACHER_WEIGHT=0.5)
  losses = fdl.build(experiment.losses())
  found = {name: loss.coefficient for name, loss in losses.items()}
  assert found == {
    'avg_xent': 0.5, 'mtp_1_xent': 0.075, 'mtp_2_xent': 0.075, 'aux_loss': 1, 'divergence': 0.5
  }  # fmt: skip


def test_without_a_weight_they_stay_as_they_are():
  """Weight decay would change what has no gradient."""
  experiment = LLaMA(**SMALL, PREDICTION_LOSS_WEIGHT=0)
  task = fdl.build(experiment.build_task())
  assert list(task.losses) == ['avg_xent', 'aux_loss']
  trainable, frozen = task.optimizer.split(meta.unbox(params_of(task)))
  assert set(frozen) >= {'predictions_0', 'predictions_1'}
  leaves = lambda tree: {
    jax.tree_util.keystr(p).split("'")[1] for p, _ in jax.tree_util.tree_leaves_with_path(tree)
  }
  assert leaves(frozen) == {'predictions_0', 'predictions_1'}
  assert leaves(trainable) == {'embedding', 'final_ln', 'softmax', 'transformer'}
  assert (
    experiment.flops_per_token == LLaMA(**SMALL | dict(NUM_PREDICTION_MODULES=0)).flops_per_token
  )


def test_floating_point_operations():
  """A module has a projection, a block and the logits."""
  plain = LLaMA(**SMALL | dict(NUM_PREDICTION_MODULES=0))
  deeper, one = plain.replaced(NUM_LAYERS=3), plain.replaced(NUM_PREDICTION_MODULES=1)
  D = SMALL['MODEL_DIMS']
  assert one.flops_per_token == deeper.flops_per_token + 6 * (2 * D * D + V * D)
  experts = MixtureOfExperts(**SMALL | EXPERTS | dict(NUM_PREDICTION_MODULES=0))
  block = experts.replaced(NUM_LAYERS=3).matmul_params - experts.matmul_params
  found = experts.replaced(NUM_PREDICTION_MODULES=1).matmul_params - experts.matmul_params
  assert found == block + 2 * D * D


class Judge(RewardModel, LLaMA):
  """A reward model."""


@pytest.mark.parametrize(
  ('cls', 'values', 'message'),
  [
    (
      LLaMA,
      dict(
        MESH_AXES=['stage', 'replica', 'data', 'mdl'], ICI_MESH_SHAPE=[2, 1, 1, 1],
        DCN_MESH_SHAPE=[1, 1, 1, 1], USE_REPEATED_LAYER=True,
      ),
      'NUM_PREDICTION_MODULES=2 needs a mesh without an axis stage',
    ),
    (LLaMA, dict(USE_LORA=True, PREDICTION_LOSS_WEIGHT=0.3), 'be trained with USE_LORA=True'),
    (Judge, {}, 'a reward model predicts no tokens'),
    (LLaMA, dict(PREDICTION_LOSS_WEIGHT=-1.0), 'must not be negative'),
    (LLaMA, dict(USE_TE='layer', PACKED_INPUT=False), r'NUM_PREDICTION_MODULES=2 \(only 0\)'),
  ],
)  # fmt: skip
def test_refusals(cls, values, message):
  with pytest.raises(UserError, match=message) as e:
    cls(**SMALL | values).validate()
  assert '\n' not in str(e.value)


class Preferred(HuggingFacePreferences, LLaMA):
  """Trained on preferences."""


def test_other_losses_leave_them_frozen():
  """A user of DPO or LoRA need not know of modules that a folder happens to have."""
  sizes = {k: v for k, v in SMALL.items() if k != 'MAX_SEQ_LEN'}
  preferred = Preferred(**sizes)
  assert preferred.PREDICTION_LOSS_WEIGHT == 0
  assert list(preferred.losses()) == ['dpo', 'aux_loss']
  with pytest.raises(UserError, match='cannot be trained with the losses of Preferred'):
    preferred.replaced(PREDICTION_LOSS_WEIGHT=0.3).validate()
  task = make(USE_LORA=True)
  trainable, _ = task.optimizer.split(params_of(task))
  names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(trainable)]
  assert names
  assert not any('predictions' in name for name in names)
