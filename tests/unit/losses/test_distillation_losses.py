"""Divergences from a teacher, and their gradients, equal those of torch, in chunks or whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlite.layers.language_model import LogitFactors
from paxlite.losses.distillation_losses import (
  TEACHER_IDS,
  TEACHER_LOG_PROBS,
  Distillation,
  StoredDistillation,
  most_likely,
)

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
    loss = Distillation(kind=kind, temperature=temperature, num_chunks=chunks)
    of = lambda x, w, loss=loss: loss(Models((x, w), teacher), {'weights': jnp.asarray(weights)})
    found, gradients = jax.value_and_grad(of, (0, 1))(*map(jnp.asarray, student))
    for ours, theirs in zip((found, *gradients), expected, strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(fast=1)
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


def test_ids_that_fill_up_a_vocabulary_do_not_count():
  student, teacher, weights = arrays()
  batch = {'weights': jnp.asarray(weights)}
  longer = teacher[0], np.concatenate([teacher[1], np.ones((3, 2 * D), np.float32)])
  plain, filled = Models(student, teacher), Models(student, teacher)
  filled.reference = Models(longer, None, jnp.arange(V + 3) / V)
  assert float(Distillation()(filled, batch)) == float(Distillation()(plain, batch))


def test_a_student_that_is_its_teacher():
  _, teacher, weights = arrays()
  same = Models(teacher, teacher, jnp.arange(V) / V)
  batch = {'weights': jnp.asarray(weights)}
  for kind in ('forward', 'reverse', 'jensen_shannon'):
    loss = Distillation(kind=kind, num_chunks=2)
    assert float(loss(same, batch)) == pytest.approx(0, abs=1e-5)
    assert float(loss.metrics(same, batch)['teacher_agreement'].value) == 1
