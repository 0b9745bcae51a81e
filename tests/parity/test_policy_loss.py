"""The loss of rollouts is trl's, with its clipping, divergences and means."""

import collections
import types

import jax
import numpy as np
import pytest

from paxlite.finetuning.reinforcement.policy_loss import BEHAVIOUR, OLD, STALENESS, PolicyLoss

torch = pytest.importorskip('torch')

B, T, PROMPT = 4, 9, 3


def drawn():
  """Returns log-probabilities now, before and of a reference, the tokens of answers, advantages."""
  rng = np.random.default_rng(0)
  logs = -rng.uniform(0.1, 4, (3, B, T)).astype(np.float32)
  logs[1] = logs[0] + rng.normal(0, 0.4, (B, T))
  own = np.zeros((B, T), np.float32)
  for row, stop in zip(own, (9, 5, 7, 4), strict=True):
    row[PROMPT:stop] = 1
  return logs, own, rng.normal(size=B).astype(np.float32)


def of_trl(loss, logs, own, advantages, importance=None):
  """Returns trl's loss and its gradient in the log-probabilities."""
  trl = pytest.importorskip('trl')
  now, old, reference = (torch.tensor(x[:, PROMPT:]) for x in logs)
  now.requires_grad_(True)
  given = types.SimpleNamespace(
    aux_loss_enabled=False, _entropy_bonus_enabled=False, top_entropy_quantile=1.0,
    off_policy_mask_threshold=None, importance_sampling_level=loss.ratio, beta=loss.kl_weight,
    loss_type=loss.mean,
    epsilon_low=loss.clip_low, epsilon_high=loss.clip_high,
    use_vllm=importance is not None, vllm_importance_sampling_correction=True,
    max_completion_length=loss.length, current_gradient_accumulation_steps=1,
    model=types.SimpleNamespace(training=False), _metrics={'eval': collections.defaultdict(list)},
    args=types.SimpleNamespace(
      delta=None, use_bias_correction_kl=False, steps_per_generation=1, report_to=[]
    ),
    accelerator=types.SimpleNamespace(
      num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    ),
    _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
  )  # fmt: skip
  mask = torch.tensor(own[:, PROMPT:])
  inputs = dict(
    prompt_ids=torch.zeros(B, PROMPT), prompt_mask=torch.ones(B, PROMPT),
    completion_ids=torch.zeros(B, T - PROMPT), completion_mask=mask,
    advantages=torch.tensor(advantages), old_per_token_logps=old, ref_per_token_logps=reference,
    num_items_in_batch=mask.sum(), importance_sampling_ratio=importance,
  )  # fmt: skip
  value = trl.GRPOTrainer._compute_loss(given, None, inputs)
  value.backward()
  return float(value), now.grad.numpy()


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('mean', ['grpo', 'dr_grpo', 'dapo'])
@pytest.mark.parametrize('ratio', ['token', 'sequence'])
@pytest.mark.parametrize('kl_weight', [0.0, 0.3])
@pytest.mark.parametrize('most', [None, 1.1])
def test_the_loss_and_its_gradient_are_those_of_trl(mean, ratio, kl_weight, most):
  loss = PolicyLoss(
    mean=mean, ratio=ratio, clip_low=0.2, clip_high=0.28, kl_weight=kl_weight, length=13,
    most_importance=most or 0.0,
  )  # fmt: skip
  logs, own, advantages = drawn()
  behaviour = logs[1] + np.random.default_rng(1).normal(0, 0.3, (B, T)).astype(np.float32)
  truncated = torch.tensor(np.minimum(np.exp(logs[1] - behaviour), most or np.inf)[:, PROMPT:])
  expected, gradient = of_trl(loss, logs, own, advantages, truncated if most else None)
  batch = {
    'labels': None, 'weights': own, 'advantages': own * advantages[:, None], 'rewards': own,
    OLD: logs[1],
  }  # fmt: skip
  batch |= {BEHAVIOUR: behaviour, STALENESS: own} if most else {}

  def ours(now_BT):
    reference = types.SimpleNamespace(log_probs=logs[2])
    outputs = types.SimpleNamespace(log_probs=now_BT, reference=reference, has_reference=True)
    return loss(outputs, batch) / loss.weight(batch), loss.metrics(outputs, batch)

  (value, metrics), found = jax.value_and_grad(ours, has_aux=True)(logs[0])
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(found[:, PROMPT:], gradient, rtol=1e-4, atol=1e-7)
  assert 0 < float(metrics['clipped'].value) < 1
