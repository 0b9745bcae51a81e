"""The parts of the training API that need no server: steps, messages, batches, and the order."""

import asyncio
import types

import jax
import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.serving.errors import ApiError
from paxlite.training_api import sessions, wire
from paxlite.training_api.examples import LossExample, LossExamples, batches
from paxlite.training_api.saved_adapters import SavedAdapters
from paxlite.training_api.sessions import Sessions, TrainingRun
from paxlite.training_api.trained_adapter import AdamValues, TrainedAdapter


@pytest.mark.parametrize('clip', [0.0, 0.7])
def test_steps_are_those_of_torch(clip):
  torch = pytest.importorskip('torch')
  rng = np.random.default_rng(0)
  arrays = {'a': rng.normal(size=(3, 4)), 'b': rng.normal(size=5)}
  arrays = {k: x.astype(np.float32) for k, x in arrays.items()}
  theirs = {k: torch.tensor(x, requires_grad=True) for k, x in arrays.items()}
  values = AdamValues(0.01, 0.8, 0.97, 1e-8, 0.1, clip)
  optimizer = torch.optim.AdamW(theirs.values(), 0.01, (0.8, 0.97), 1e-8, 0.1)
  run = {}
  model = types.SimpleNamespace(
    base=types.SimpleNamespace(max_length=64),
    run=lambda *_: (np.float32(0), np.zeros((1, 32), np.float32), run['gradients']),
  )
  ours = TrainedAdapter(model, {k: jax.numpy.asarray(x) for k, x in arrays.items()})
  ids = np.zeros(4, np.int32)
  example = LossExamples('cross_entropy', {}, [LossExample(ids, ids, {'weights': np.ones(4)})])
  for _ in range(4):
    total = dict.fromkeys(arrays, np.float32(0))
    for _ in range(2):  # they add up
      run['gradients'] = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in arrays.items()}
      total = {k: total[k] + g for k, g in run['gradients'].items()}
      ours.run(example, learns=True)
    for k, w in theirs.items():
      w.grad = torch.tensor(total[k])
    norm = np.sqrt(sum((g**2).sum() for g in total.values()))
    if clip:
      torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
    optimizer.step()
    assert ours.step(values)['grad_norm'] == pytest.approx(norm, rel=1e-5)
    for k, w in theirs.items():
      np.testing.assert_allclose(ours.factors[k], w.detach().numpy(), rtol=2e-6, atol=1e-7)
  with pytest.raises(UserError, match='no gradients'):
    ours.step(values)


def test_what_is_not_finite_changes_nothing():
  infinite = {'a': np.full(3, np.inf, np.float32)}
  losses = iter([np.nan, 1.0])
  model = types.SimpleNamespace(
    base=types.SimpleNamespace(max_length=64),
    run=lambda *_: (np.float32(next(losses)), np.zeros((1, 32), np.float32), infinite),
  )
  adapter = TrainedAdapter(model, {'a': jax.numpy.ones(3)})
  ids = np.zeros(4, np.int32)
  example = LossExamples('cross_entropy', {}, [LossExample(ids, ids, {'weights': np.ones(4)})])
  with pytest.raises(UserError, match='the sum of the losses is nan'):
    adapter.run(example, learns=True)
  with pytest.raises(UserError, match='no gradients'):
    adapter.step(AdamValues())
  adapter.run(example, learns=True)
  with pytest.raises(UserError, match='the norm of the gradients is inf'):
    adapter.step(AdamValues())
  np.testing.assert_array_equal(adapter.factors['a'], np.ones(3))


def test_batches_have_few_shapes_and_all_examples():
  rng = np.random.default_rng(0)
  lengths = [*rng.integers(1, 300, 400), 300, 1]
  examples = [
    LossExample(ids := rng.integers(0, 9, n).astype(np.int32), ids, {'weights': np.ones(n)})
    for n in lengths
  ]
  seen, shapes = [], set()
  for indices, batch in batches(examples, 300):
    shapes.add(batch['ids'].shape)
    for i, row, weights in zip(indices, batch['ids'], batch['weights'], strict=False):
      np.testing.assert_array_equal(row[: lengths[i]], examples[i].ids)
      assert weights.sum() == lengths[i]
    assert batch['weights'][len(indices) :].sum() == 0
    seen += indices
  assert sorted(seen) == [*range(len(lengths))]
  assert {length for _, length in shapes} == {32, 64, 128, 256, 300}
  assert len(shapes) <= 10


def test_the_messages_are_the_clients():
  tinker = pytest.importorskip('tinker')
  from tinker.proto.request_conv import forward_backward_request_to_proto
  from tinker.proto.response_conv import deserialize_proto_response

  data = [
    tinker.types.Datum(
      model_input=tinker.types.ModelInput.from_ints([3, 4]).append_int(5),
      loss_fn_inputs={'target_tokens': [4, 5, 6], 'weights': [0.5, 1.0, 0.0]},
    )
  ]
  given = tinker.types.ForwardBackwardInput(data=data, loss_fn='ppo', loss_fn_config={'x': 0.5})
  request = tinker.types.ForwardBackwardRequest(given, 'run', 7)
  message = wire.forward_backward_request(
    forward_backward_request_to_proto(request).SerializeToString()
  )
  assert (message.model_id, message.seq_id, message.loss_fn) == ('run', 7, 'ppo')
  assert [(s.key, s.value.number) for s in message.loss_fn_config_v2] == [('x', 0.5)]
  (datum,) = message.data
  assert wire.tokens_of(datum.model_input, '').tolist() == [3, 4, 5]
  arrays = {one.key: wire.array_of(one.value, '').tolist() for one in datum.loss_fn_inputs}
  assert arrays == {'target_tokens': [4, 5, 6], 'weights': [0.5, 1.0, 0.0]}
  rows = [np.array([1, 2], np.float32), np.array([3], np.float32)]
  found = deserialize_proto_response(
    wire.forward_backward_output(rows, 1.5), tinker.types.ForwardBackwardOutput
  )
  assert [list(x['logprobs'].data) for x in found.loss_fn_outputs] == [[1, 2], [3]]
  assert found.metrics == {'loss:sum': 1.5}
  with pytest.raises(ValueError, match='pars'):
    wire.forward_backward_request(b'\x0a\xff')


def test_requests_are_in_order_and_gaps_are_skipped(monkeypatch):
  monkeypatch.setattr(sessions, '_GAP_SECONDS', 0.05)

  async def sent() -> list[int]:
    run, done = TrainingRun('r', {}), []
    for number in (3, 2, 1, 4, 6, 7):  # 5 never comes in time
      run.in_turn(number, lambda number=number: done.append(number))
    assert done == [1, 2, 3, 4]
    await asyncio.sleep(0.2)
    run.in_turn(5, lambda: done.append(5))
    run.in_turn(8, lambda: done.append(8))
    return done

  assert asyncio.run(sent()) == [1, 2, 3, 4, 6, 7, 5, 8]


def test_sessions_of_clients_that_vanish_are_dropped(monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr(sessions.time, 'monotonic', lambda: clock.now)
  found = Sessions(types.SimpleNamespace(), most_waiting=2, seconds=50.0)
  silent, other = found.new(), found.new()
  run = found.new_run(silent, 0, {})
  assert found.run_of(run.id) == (silent, run)
  clock.now = 40.0
  found.of(other.id)
  clock.now = 60.0
  assert found.of(f'{other.id}:train:0') is other
  with pytest.raises(ApiError, match='its client was silent for 50 seconds'):
    found.run_of(run.id)
  with pytest.raises(ApiError, match='does not exist'):
    found.run_of(f'{other.id}:train:0')


def test_limits_and_samplers_of_a_session():
  async def asked() -> None:
    found = Sessions(types.SimpleNamespace(), most_waiting=2, seconds=50.0)
    session = found.new()
    begun = []
    first = found.promise(session, 'a', begun.append)
    assert found.promise(session, 'a', begun.append) is first
    found.promise(session, 'b', begun.append)
    with pytest.raises(ApiError, match='Too many requests'):
      found.promise(session, 'c', begun.append)
    first.tell({'x': 1})
    first.tell({'x': 2})
    assert await first.wait(1)
    session.promises.fetched(first)
    found.promise(session, 'c', begun.append)
    assert [promise.id for promise in begun] == ['a', 'b', 'c']
    assert session.promises.get('a').result == {'x': 1}
    found.end(session)
    assert begun[1].is_cancelled
    ids = [session.add_sampler(i, sessions.SampledAdapter(is_held=True)) for i in range(18)]
    assert [session.samplers[id] is None for id in ids] == [True] * 2 + [False] * 16

  asyncio.run(asked())


@pytest.mark.parametrize('name', ['', '..', '.x', 'a/b', '../../x', 'a' * 201, 'ä', None, 3])
def test_names_do_not_leave_the_folder(tmp_path, name):
  saved = SavedAdapters(tmp_path, 0)
  with pytest.raises(UserError, match='is not supported: use up to 200 letters'):
    saved.path('run', 'weights', name)
  for path in (f'tinker://run/weights/{name}', f'tinker://../weights/{name}', 'x', f'{name}'):
    with pytest.raises(UserError, match=r'is not a path of saved weights|does not exist'):
      saved.kind(path)
