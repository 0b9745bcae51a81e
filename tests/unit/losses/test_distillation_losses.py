"""Divergences from a teacher and their gradients equal those of torch and trl, in chunks or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.finetuning.distillation.distillation_losses import (
  TEACHER_IDS,
  TEACHER_LOG_PROBS,
  AnswersDivergence,
  DistillationLoss,
  StoredDistillation,
  divergence,
  most_likely,
  of_tokens,
)
from paxlite.finetuning.distillation.sampled_divergence import (
  TEACHER_LABEL,
  SampledDivergence,
  label_log_probs,
)
from paxlite.layers.language_model import LogitFactors

B, T, D, V = 2, 6, 5, 11


class Models:
  """Outputs of a student and of a teacher that is wider than it."""

  has_reference = True

  def __init__(self, student, teacher, bias=None):
    self.logit_factors = LogitFactors(*map(jnp.asarray, student), bias, 0.0)
    self.reference = teacher and Models(teacher, None, jnp.arange(V) / V)

  def once(self, key, compute):
    return compute()


def arrays():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  student, teacher = (normal(B, T, D), normal(V, D)), (normal(B, T, 2 * D), normal(V, 2 * D))
  return student, teacher, rng.integers(0, 2, (B, T)).astype(np.float32)


def of_torch(kind, temperature, student, teacher, weights, count=None):
  """Returns the loss and its gradients for the student's arrays.

  With a count, so many likely tokens of the teacher are told apart, and all others count as one.
  """
  torch = pytest.importorskip('torch')
  import torch.nn.functional as F

  x, w = (torch.tensor(a, requires_grad=True) for a in student)
  ours = (x @ w.T / temperature).log_softmax(-1)
  y, v = map(torch.tensor, teacher)
  theirs = ((y @ v.T + torch.arange(V) / V) / temperature).log_softmax(-1)
  if count:
    ids = theirs.topk(count, -1).indices
    kept = [x.gather(-1, ids) for x in (ours, theirs)]
    ours, theirs = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in kept)
  kl = lambda p, q: F.kl_div(q, p, reduction='none', log_target=True).sum(-1)
  middle = torch.logsumexp(torch.stack([ours, theirs]) - np.log(2), 0)
  each = {
    'forward': lambda: kl(theirs, ours),
    'reverse': lambda: kl(ours, theirs),
    'jensen_shannon': lambda: (kl(theirs, middle) + kl(ours, middle)) / 2,
  }[kind]()
  loss = (each * torch.tensor(weights)).sum() * temperature**2
  loss.backward()
  return loss.item(), x.grad.numpy(), w.grad.numpy()


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize('temperature', [1.0, 2.5])
@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_divergences_equal_torch(kind, temperature):
  student, teacher, weights = arrays()
  expected = of_torch(kind, temperature, student, teacher, weights)
  for chunks in (1, 3):
    loss = DistillationLoss(kind=kind, temperature=temperature, num_chunks=chunks)
    of = lambda x, w, loss=loss: loss(Models((x, w), teacher), {'weights': jnp.asarray(weights)})
    found, gradients = jax.value_and_grad(of, (0, 1))(*map(jnp.asarray, student))
    for ours, theirs in zip((found, *gradients), expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def generalized(ours, theirs, weights, beta):
  """Returns the mean over targets in float64, and its gradient for the student's logits."""
  q, p = (np.exp(x - x.max(-1, keepdims=True)) for x in (ours, theirs))
  q, p = (x / x.sum(-1, keepdims=True) for x in (q, p))
  m = beta * p + (1 - beta) * q
  kl = lambda a, b: (a * np.log(a / b)).sum(-1)
  if beta == 0:
    each, slope = kl(p, q), -p / q
  elif beta == 1:
    each, slope = kl(q, p), np.log(q / p) + 1
  else:
    each = beta * kl(p, m) + (1 - beta) * kl(q, m)
    slope = (1 - beta) * np.log(q / m)
  share = weights / weights.sum()
  gradient = q * (slope - (q * slope).sum(-1, keepdims=True)) * share[..., None]
  return (each * share).sum(), gradient


def of_logits(ours, theirs, weights, beta, temperature, more):
  """Returns the mean over targets without τ², and its gradient; β of 0 and 1 name the limits."""
  kind = {0.0: 'forward', 1.0: 'reverse'}.get(beta, 'jensen_shannon')
  loss = AnswersDivergence(kind=kind, beta=beta or 0.5, temperature=temperature, **more)
  batch = {'weights': jnp.asarray(weights, jnp.float32)}
  theirs = jnp.asarray(theirs, jnp.float32)

  def of(x):
    outputs = Models((x, jnp.eye(V)), (theirs, jnp.eye(V)))
    outputs.reference.logit_factors = LogitFactors(theirs, jnp.eye(V), None, 0.0)
    return loss(outputs, batch) / loss.weight(batch) / temperature**2

  return jax.value_and_grad(of)(jnp.asarray(ours, jnp.float32))


def of_trl(ours, theirs, weights, beta, temperature):
  gkd = pytest.importorskip('trl.experimental.gkd')
  torch = pytest.importorskip('torch')
  x = torch.tensor(ours, requires_grad=True)
  labels = torch.where(torch.tensor(weights) > 0, 0, -100)
  loss = gkd.GKDTrainer.generalized_jsd_loss(x, torch.tensor(theirs), labels, beta, temperature)
  loss.backward()
  return loss.item(), x.grad.numpy()


def of_float64(ours, theirs, weights, beta, temperature):
  value, slope = generalized(ours / temperature, theirs / temperature, weights, beta)
  return value, slope / temperature


def check_generalized(expected):
  rng = np.random.default_rng(0)
  ours, theirs = rng.normal(size=(2, B, T, V)) * 3
  weights = rng.integers(0, 2, (B, T)).astype(np.float64)
  for beta, temperature in ((0.0, 1.0), (0.1, 0.7), (0.5, 1.0), (0.9, 2.5), (1.0, 0.7)):
    given = ours, theirs, weights, beta, temperature
    value, slope = expected(*given)
    for more in ({}, {'num_chunks': 3}, {'top_k': V}):
      found, gradient = of_logits(*given, more)
      np.testing.assert_allclose(found, value, rtol=1e-5)
      np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)


def test_generalized_divergences_and_their_gradients_equal_float64():
  check_generalized(of_float64)


@pytest.mark.slow
def test_generalized_divergences_and_their_gradients_equal_trl():
  check_generalized(of_trl)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_likely_tokens_of_each_step_are_those_that_are_stored(kind):
  student, teacher, weights = arrays()
  batch = {'weights': jnp.asarray(weights)}
  values = dict(kind=kind, temperature=2.5, beta=0.5)
  ids, log_probs = most_likely(Models(teacher, None, jnp.arange(V) / V).logit_factors, 3, 2.5)
  stored = StoredDistillation(vocab_size=V, **values)
  named = {**batch, TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs}
  for chunks in (1, 3):
    loss = DistillationLoss(top_k=3, num_chunks=chunks, **values)
    of = lambda x, loss=loss: loss(Models((x, student[1]), teacher), batch)
    whole = lambda x: stored(Models((x, student[1]), None), named)
    for ours, theirs in zip(
      jax.value_and_grad(of)(student[0]), jax.value_and_grad(whole)(student[0]), strict=True
    ):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_stored_likely_tokens_equal_torch(kind):
  """All tokens of the vocabulary give the divergence of the whole distributions."""
  student, teacher, weights = arrays()
  for count in (3, V):
    expected = of_torch(kind, 2.5, student, teacher, weights, count if count < V else None)
    ids, log_probs = most_likely(Models(teacher, None, jnp.arange(V) / V).logit_factors, count, 2.5)
    batch = {'weights': jnp.asarray(weights), TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs}
    for chunks in (1, 3):
      loss = StoredDistillation(kind=kind, temperature=2.5, num_chunks=chunks, vocab_size=V)
      of = lambda x, w, loss=loss, batch=batch: loss(Models((x, w), None), batch)
      found, gradients = jax.value_and_grad(of, (0, 1))(*map(jnp.asarray, student))
      for ours, theirs in zip((found, *gradients), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def of_events(kind, ours, teacher, ids):
  """Returns the divergence and its gradient for float64 logits [n, V] of a student."""
  n, k = ids.shape
  is_kept = np.zeros(ours.shape, bool)
  np.put_along_axis(is_kept, ids, True, -1)
  groups = np.where(is_kept, 0, k)
  np.put_along_axis(groups, ids, np.broadcast_to(np.arange(k), (n, k)), -1)

  def together(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, np.stack([(p * (groups == g)).sum(-1) for g in range(k + 1)], -1)

  each, q = together(ours)
  _, p = together(teacher)
  m = (p + q) / 2
  kl = lambda p, q: (p * np.log(p / q)).sum(-1)
  found, slope = {
    'forward': lambda: (kl(p, q), -p / q),
    'reverse': lambda: (kl(q, p), np.log(q / p) + 1),
    'jensen_shannon': lambda: ((kl(p, m) + kl(q, m)) / 2, np.log(q / m) / 2),
  }[kind]()
  of_token = np.take_along_axis(slope, groups, -1)
  return found, each * (of_token - (each * of_token).sum(-1, keepdims=True))


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize('rest', [0.3, 1e-3, 1e-5, 1e-7, 1e-12])
@pytest.mark.parametrize('kind', ['forward', 'reverse', 'jensen_shannon'])
def test_what_is_left_beside_likely_tokens_keeps_its_digits(kind, rest):
  rng = np.random.default_rng(0)
  n, vocab, k = 8, 40, 4
  ids = np.stack([rng.permutation(vocab)[:k] for _ in range(n)])

  def drawn(left):
    logits = rng.normal(size=(n, vocab))
    p = np.exp(logits)
    is_kept = np.zeros(p.shape, bool)
    np.put_along_axis(is_kept, ids, True, -1)
    share = np.where(is_kept, (1 - left) / (p * is_kept).sum(-1, keepdims=True),
                     left / (p * ~is_kept).sum(-1, keepdims=True))  # fmt: skip
    return (np.log(p * share) + 20).astype(np.float32)  # as large as logits are

  ours, theirs = drawn(rest), drawn(3 * rest)
  wide = [x.astype(np.float64) for x in (ours, theirs)]
  expected, gradient = of_events(kind, *wide, ids)
  teacher = of_tokens(jnp.asarray(theirs), jnp.asarray(ids))
  of = lambda x: divergence(kind, of_tokens(x, jnp.asarray(ids)), teacher)
  found, slope = of(jnp.asarray(ours)), jax.grad(lambda x: of(x).sum())(jnp.asarray(ours))
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
  others = np.ones(slope.shape, bool)
  np.put_along_axis(others, ids, False, -1)
  np.testing.assert_allclose(slope[others], gradient[others], rtol=1e-3, atol=1e-6 * rest)
  log_rest = np.log(np.exp(wide[0]).sum(-1, where=others) / np.exp(wide[0]).sum(-1))
  np.testing.assert_allclose(of_tokens(jnp.asarray(ours), ids)[..., -1], log_rest, atol=1e-5)


@pytest.mark.slow
def test_where_nothing_is_left_the_gradient_is_finite():
  logits = jnp.arange(5.0)[None]
  ids = jnp.arange(5)[None]
  teacher = of_tokens(logits[:, ::-1], ids)
  for kind in ('forward', 'reverse', 'jensen_shannon'):
    of = lambda x, kind=kind: divergence(kind, of_tokens(x, ids), teacher).sum()
    whole = lambda x, kind=kind: divergence(
      kind, jax.nn.log_softmax(x), jax.nn.log_softmax(logits[:, ::-1])
    ).sum()
    for f, g in zip(jax.value_and_grad(of)(logits), jax.value_and_grad(whole)(logits), strict=True):
      np.testing.assert_allclose(f, g, rtol=1e-5, atol=1e-6)


def test_ids_that_fill_up_a_vocabulary_do_not_count():
  student, teacher, weights = arrays()
  batch = {'weights': jnp.asarray(weights)}
  longer = teacher[0], np.concatenate([teacher[1], np.ones((3, 2 * D), np.float32)])
  plain, filled = Models(student, teacher), Models(student, teacher)
  filled.reference = Models(longer, None, jnp.arange(V + 3) / V)
  assert float(DistillationLoss()(filled, batch)) == float(DistillationLoss()(plain, batch))


def test_a_student_that_is_its_teacher():
  _, teacher, weights = arrays()
  same = Models(teacher, teacher, jnp.arange(V) / V)
  batch = {'weights': jnp.asarray(weights)}
  for kind in ('forward', 'reverse', 'jensen_shannon'):
    loss = DistillationLoss(kind=kind, num_chunks=2)
    assert float(loss(same, batch)) == pytest.approx(0, abs=1e-5)
    assert float(loss.metrics(same, batch)['teacher_agreement'].value) == 1


def of_sampled(kind, gradient, ours, theirs, labels, weights):
  """Returns the sum in float64 by verl's formulas, and its gradient for the student's logits."""
  q, p = (np.exp(x - x.max(-1, keepdims=True)) for x in (ours, theirs))
  q, p = (x / x.sum(-1, keepdims=True) for x in (q, p))
  at = lambda x: np.log(np.take_along_axis(x, labels[..., None], -1)[..., 0])
  d = at(p) - at(q)
  inside = np.abs(d) < 20
  bounded = np.clip(d, -20, 20)
  third = np.exp(bounded) - bounded - 1
  value = {'k1': -d, 'k2': d**2 / 2, 'k3': np.clip(third, -10, 10)}[kind]
  direct = {'k1': 1, 'k2': -d, 'k3': (1 - np.exp(bounded)) * inside * (third < 10)}[kind]
  slope = direct if gradient == 'direct' else value
  of_log_q = np.eye(V)[labels] - q
  return (value * weights).sum(), of_log_q * (slope * weights)[..., None]


@pytest.mark.parametrize('gradient', ['direct', 'policy'])
@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_estimates_at_drawn_tokens_equal_the_published_formulas(kind, gradient):
  """Also beyond the bounds of k3, in chunks, and with the teacher's values from before."""
  rng = np.random.default_rng(3)
  ours, theirs = rng.normal(size=(2, B, T, V)) * 6
  ours[0, 0, :2] = 40, 0  # a token that the teacher almost excludes
  theirs[0, 0, :2] = 0, 40
  labels, weights = rng.integers(0, V, (B, T)), rng.integers(0, 2, (B, T)).astype(np.float64)
  labels[0, 0], weights[0, 0] = 0, 1
  value, slope = of_sampled(kind, gradient, ours / 0.7, theirs / 0.7, labels, weights)
  batch = {'weights': jnp.asarray(weights, jnp.float32), 'labels': jnp.asarray(labels)}
  batch['segment_ids'] = jnp.ones_like(batch['labels'])
  teacher = LogitFactors(jnp.asarray(theirs, jnp.float32), jnp.eye(V), None, 0.0)
  log_probs, ids = label_log_probs(teacher, batch['labels'], 0.7)
  stored = batch | {TEACHER_LABEL: log_probs, TEACHER_IDS: ids[..., None]}
  agreements = []
  for given, chunks in ((batch, 1), (batch, 3), (stored, 1)):
    loss = SampledDivergence(kind=kind, gradient=gradient, temperature=0.7, num_chunks=chunks)

    def of(x, given=given, loss=loss):
      outputs = Models((x, jnp.eye(V)), (theirs, jnp.eye(V)) if given is batch else None)
      if given is batch:
        outputs.reference.logit_factors = teacher
      return loss(outputs, given), loss.metrics(outputs, given)['teacher_agreement'].value

    (found, agrees), gradients = jax.value_and_grad(of, has_aux=True)(
      jnp.asarray(ours, jnp.float32)
    )
    np.testing.assert_allclose(found, value, rtol=1e-5)
    atol = 1e-5 * np.abs(slope).max()
    np.testing.assert_allclose(gradients, slope / 0.7, rtol=1e-4, atol=atol)
    agreements.append(float(agrees))
  assert len(set(agreements)) == 1


def test_the_mean_gradient_of_an_estimate_is_that_of_a_divergence():
  """Each token of a vocabulary as often as the student draws it, in the place of draws.

  No token is beyond the bounds of k3, where its gradient is 0.
  """
  rng = np.random.default_rng(4)
  ours, theirs = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, V)) / 2)
  q = jax.nn.softmax(ours)
  labels = jnp.arange(V)[:, None]

  def of(kind, gradient):
    def mean(x):
      each = lambda y: LogitFactors(jnp.tile(y, (V, 1, 1)), jnp.eye(V), None, 0.0)
      outputs = Models((each(x).x_BTD, jnp.eye(V)), (each(theirs).x_BTD, jnp.eye(V)))
      outputs.reference.logit_factors = each(theirs)
      batch = {'weights': q[:, None], 'labels': labels}
      return SampledDivergence(kind=kind, gradient=gradient)(outputs, batch)

    return jax.grad(mean)(ours)

  kl = lambda kind: jax.grad(
    lambda x: divergence(kind, jax.nn.log_softmax(x), jax.nn.log_softmax(theirs))
  )(ours)
  expected = {('k1', 'direct'): 0 * q, ('k3', 'direct'): kl('forward')}
  for kind in (('k1', 'policy'), ('k2', 'direct')):
    expected[kind] = kl('reverse')
  for kind, slope in expected.items():
    np.testing.assert_allclose(of(*kind), slope, atol=1e-6, err_msg=str(kind))
