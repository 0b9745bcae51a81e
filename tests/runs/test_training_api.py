"""A real server of the training API, and the client of the package tinker.

Some tests build what users have reported of other servers of this API, or of the client: a request
that is sent twice (NovaSky-AI/SkyRL#2035), one that never arrives (agentscope-ai/TuFT#50), Adam's
moments that are not loaded (thinking-machines-lab/tinker-feedback#127), samples of saved weights
that hang (#108 there), prompts without log-probabilities (NovaSky-AI/SkyRL#1945), samples whose
log-probabilities are not the model's (thinking-machines-lab/tinker-cookbook#396), and a loss of
importance sampling that is clipped, or a mean (GMISWE/tinker-cloud#66).
"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support import runs
from tests.support.training_server import KEY, LENGTH, NAME, VOCABULARY, TrainingServer, write_model

tinker = pytest.importorskip('tinker')
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore::FutureWarning')]
ADAM = types.AdamParams(learning_rate=0.02, weight_decay=0.1, grad_clip_norm=3.0)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('training_api')
  write_model(folder)
  return folder


@pytest.fixture(scope='module')
def server(folder):
  found = TrainingServer(folder)
  yield found
  found.process.kill()
  found.process.wait()


@pytest.fixture
def service(server):
  with server.client() as found:
    yield found


def trainer(service, rank=4, seed=3, **values):
  return service.create_lora_training_client(NAME, rank=rank, seed=seed, **values).result()


def datum(seed: int, length: int = 20, loss: str = 'cross_entropy'):
  """An example of random tokens, with the arrays that a loss reads."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(2, VOCABULARY, length + 1).tolist()
  inputs = {'target_tokens': ids[1:]}
  if loss == 'cross_entropy':
    inputs['weights'] = rng.uniform(0, 1, length).round(2).tolist()
  else:
    is_own = np.arange(length) >= length // 2
    inputs['advantages'] = (rng.normal(size=length) * is_own).astype(np.float32)
    inputs['logprobs'] = (-rng.uniform(3, 8, length) * is_own).astype(np.float32)
  return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def log_probs(client, data=None) -> list[np.ndarray]:
  """The log-probabilities of examples, by which the weights of two clients are compared."""
  data = data or [datum(0), datum(1, 70)]
  found = client.forward(data, 'cross_entropy').result()
  return [np.array(x['logprobs'].data, np.float32) for x in found.loss_fn_outputs]


def steps(client, numbers, values=ADAM) -> list[float]:
  futures = []
  for i in numbers:
    data = [datum(10 * i), datum(10 * i + 1, 33), datum(10 * i + 2, 90)]
    futures.append(client.forward_backward(data, 'cross_entropy'))
    client.optim_step(values).result()
  return [future.result().metrics['loss:sum'] for future in futures]


def equal(a, b) -> bool:
  return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def peft_model(folder, server, path, dtype='float32'):
  """The model of transformers with a saved adapter, which peft reads."""
  import peft
  import torch
  from transformers import AutoModelForCausalLM

  base = AutoModelForCausalLM.from_pretrained(folder / 'hf', dtype=getattr(torch, dtype))
  saved = server.adapters / path.removeprefix('tinker://')
  return peft.PeftModel.from_pretrained(base, saved, is_trainable=True).to(getattr(torch, dtype))


def their_log_probs(model, example):
  import torch

  ids = torch.tensor([example.model_input.to_ints()])
  labels = torch.tensor(example.loss_fn_inputs['target_tokens'].data)
  return model(ids).logits[0].log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def test_losses_and_samples_are_those_of_peft(folder, server, service):
  client = trainer(service)
  assert client.get_info().lora_rank == 4
  losses = steps(client, range(3))
  assert losses[-1] < losses[0]
  path = client.save_state('numbers').result().path
  model = peft_model(folder, server, path).eval()
  data = [datum(0), datum(1, 70), datum(2, LENGTH - 1)]
  result = client.forward(data, 'cross_entropy').result()
  wanted = [their_log_probs(model, example).detach().numpy() for example in data]
  for output, theirs in zip(result.loss_fn_outputs, wanted, strict=True):
    np.testing.assert_allclose(output['logprobs'].data, theirs, atol=1e-5)
  weights = [np.array(d.loss_fn_inputs['weights'].data) for d in data]
  loss = -sum((w * x).sum() for w, x in zip(weights, wanted, strict=True))
  assert result.metrics['loss:sum'] == pytest.approx(loss, rel=1e-5)
  # samples: the log-probabilities while sampling, those of a prompt, and peft's are the same
  sampler = client.save_weights_and_get_sampling_client().result()
  prompt = data[0].model_input
  values = types.SamplingParams(max_tokens=12, seed=5, temperature=0.8)
  first, second = sampler.sample(prompt, 2, values, topk_sample_logprobs=3).result().sequences
  assert first.tokens != second.tokens
  again = sampler.sample(prompt, 2, values).result().sequences
  assert [s.tokens for s in again] == [first.tokens, second.tokens]
  whole = prompt.to_ints() + first.tokens
  scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
  assert scored[0] is None
  np.testing.assert_allclose(scored[prompt.length :], first.logprobs, atol=1e-5)
  example = types.Datum(
    model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={'target_tokens': whole[1:]}
  )
  theirs = their_log_probs(model, example).detach().numpy()
  np.testing.assert_allclose(scored[1:], theirs, atol=1e-5)
  assert all(len(row) == 3 and row[0][1] >= row[2][1] for row in first.topk_logprobs)
  last = sampler.sample(
    prompt, 1, types.SamplingParams(max_tokens=1), True, 2, prompt_logprobs_last_n=4
  ).result()
  assert last.prompt_logprobs[:-4] == [None] * (prompt.length - 4)
  np.testing.assert_allclose(last.prompt_logprobs[-4:], theirs[prompt.length - 5 :][:4], atol=1e-5)
  assert [row is None for row in last.topk_prompt_logprobs][-5:] == [True] + [False] * 4


def test_stops_are_part_of_samples(service):
  sampler = service.create_sampling_client(base_model=NAME).result()
  prompt = types.ModelInput.from_ints([7, 8, 9])
  free = lambda **values: sampler.sample(
    prompt, 1, types.SamplingParams(max_tokens=20, seed=1, **values)
  ).result().sequences[0]  # fmt: skip
  whole = free(stop=[])
  assert (len(whole.tokens), whole.stop_reason) == (20, 'length')
  stop = whole.tokens[6]
  found = free(stop=[stop])
  assert found.stop_reason == 'stop'
  assert found.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
  assert len(found.logprobs) == len(found.tokens)


def test_clients_do_not_change_each_other(server, service):
  """Two clients that take turns compute the same bits as each of them alone."""
  with server.client() as other_service:
    a, b = trainer(service, rank=4, seed=1), trainer(other_service, rank=2, seed=2)
    for i in range(3):
      data = [datum(i), datum(i + 50, 40)]
      futures = [c.forward_backward(data, 'cross_entropy') for c in (a, b, a)]
      futures += [c.optim_step(ADAM) for c in (b, a)]
      for future in futures:
        future.result()
    together = [log_probs(a), log_probs(b)]
  for (rank, seed, twice), wanted in zip([(4, 1, 2), (2, 2, 1)], together, strict=True):
    alone = trainer(service, rank=rank, seed=seed)
    for i in range(3):
      for _ in range(twice):
        alone.forward_backward([datum(i), datum(i + 50, 40)], 'cross_entropy').result()
      alone.optim_step(ADAM).result()
    assert equal(log_probs(alone), wanted)
  assert not equal(*together)


@pytest.mark.parametrize(
  ('loss', 'config'),
  [
    ('cross_entropy', None),
    ('importance_sampling', None),
    ('ppo', {'clip_low_threshold': 0.5, 'clip_high_threshold': 1.5}),
    ('cispo', None),
  ],
)
def test_gradients_are_those_of_float64(folder, server, service, loss, config):
  """A step of Adam without memory moves a weight by lr·g/(|g| + eps), from which g follows."""
  import torch

  client = trainer(service, rank=2)
  steps(client, range(2))
  before = client.save_state('before').result().path
  data = [datum(i, 12 + 9 * i, loss) for i in range(3)]
  result = client.forward_backward(data, loss, config).result()
  rate, eps = 300.0, 300.0
  client.optim_step(
    types.AdamParams(learning_rate=rate, beta1=0, beta2=0, eps=eps)
  ).result()  # fmt: skip
  after = client.save_state('after').result().path
  model = peft_model(folder, server, before, 'float64')
  total = 0
  for example in data:
    found = their_log_probs(model, example)
    arrays = {k: torch.tensor(x.data).double() for k, x in example.loss_fn_inputs.items()}
    if loss == 'cross_entropy':
      total -= (arrays['weights'] * found).sum()
      continue
    advantages, ratio = arrays['advantages'], (found - arrays['logprobs']).exp()
    if loss == 'importance_sampling':
      total -= (ratio * advantages).sum()
    elif loss == 'ppo':
      total -= torch.minimum(ratio * advantages, ratio.clamp(0.5, 1.5) * advantages).sum()
    else:
      total -= (ratio.clamp(0.8, 1.2).detach() * found * advantages).sum()
  total.backward()
  assert result.metrics['loss:sum'] == pytest.approx(float(total), rel=1e-5)
  moved = dict(peft_model(folder, server, after, 'float64').named_parameters())
  gradients, errors = [], []
  for name, w in model.named_parameters():
    if 'lora_' in name:
      delta = (w - moved[name]).detach().numpy()
      ours = delta * eps / (rate - np.abs(delta))
      gradients.append(np.abs(w.grad.numpy()).max())
      errors.append(np.abs(ours - w.grad.numpy()).max())
  assert len(gradients) == 28
  assert max(errors) < 1e-5 * max(1.0, max(gradients))


def test_a_custom_loss_is_that_of_the_server(service):
  a, b = trainer(service), trainer(service)
  data = [datum(1), datum(2, 31)]
  weights = [d.loss_fn_inputs['weights'].to_torch() for d in data]

  def custom(data, log_probs):
    loss = -sum((w * x).sum() for w, x in zip(weights, log_probs, strict=True))
    return loss, {'mine': float(loss)}

  first = a.forward_backward_custom(data, custom)
  a.optim_step(ADAM).result()
  second = b.forward_backward(data, 'cross_entropy')
  b.optim_step(ADAM).result()
  assert first.result().metrics['mine'] == pytest.approx(second.result().metrics['loss:sum'])
  assert equal(log_probs(a), log_probs(b))


def test_saved_states_go_on(folder, service):
  """A state with Adam's moments goes on as if there had been no end; one without them does not."""
  client = trainer(service)
  steps(client, range(2))
  path = client.save_state('kept', user_metadata={'why': 'test'}).result().path
  steps(client, [2])
  with_moments = service.create_training_client_from_state_with_optimizer(path).result()
  without = service.create_training_client_from_state(path).result()
  later = trainer(service, seed=9)
  later.load_state_with_optimizer(path).result()
  for other in (with_moments, without, later):
    steps(other, [2])
  assert equal(log_probs(with_moments), log_probs(client))
  assert equal(log_probs(later), log_probs(client))
  assert not equal(log_probs(without), log_probs(client))
  with pytest.raises(tinker.RequestFailedError, match='exists already: choose another name'):
    client.save_state('kept').result()
  client.save_state('kept', overwrite=True).result()
  again = service.create_training_client_from_state(path).result()
  assert equal(log_probs(again), log_probs(client))
  state = folder / 'adapters' / path.removeprefix('tinker://') / 'state.json'
  assert json.loads(state.read_text())['user_metadata'] == {}


def test_samplers_read_saved_weights_of_a_server_before(folder):
  values, prompt = types.SamplingParams(max_tokens=8, seed=2), types.ModelInput.from_ints([5, 6, 7])
  first = TrainingServer(folder)
  try:
    with first.client() as service:
      client = trainer(service)
      steps(client, range(2), types.AdamParams(learning_rate=0.1))
      path = client.save_weights_for_sampler('later').result().path
      sampler = client.save_weights_and_get_sampling_client().result()
      wanted = sampler.sample(prompt, 1, values).result().sequences[0]
  finally:
    assert first.end() == 0
  second = TrainingServer(folder)
  try:
    with second.client() as service:
      sampler = service.create_sampling_client(model_path=path).result()
      assert sampler.get_base_model() == NAME
      found = sampler.sample(prompt, 1, values).result().sequences[0]
      assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
      base = service.create_sampling_client(base_model=NAME).result()
      assert base.sample(prompt, 1, values).result().sequences[0].logprobs != wanted.logprobs
  finally:
    assert second.end() == 0


def test_a_request_that_is_sent_twice_counts_once(service, monkeypatch):
  from tinker.resources.training import AsyncTrainingResource

  alone = trainer(service)
  steps(alone, range(2))
  for name in ('forward_backward', 'optim_step'):
    once = getattr(AsyncTrainingResource, name)

    async def twice(self, _once=once, **values):
      first = await _once(self, **values)
      second = await _once(self, **values)
      assert first.request_id == second.request_id
      return second

    monkeypatch.setattr(AsyncTrainingResource, name, twice)
  client = trainer(service)
  steps(client, range(2))
  assert equal(log_probs(client), log_probs(alone))


def test_a_request_that_never_arrives_does_not_stop_the_others(service, monkeypatch):
  from tinker.resources.training import AsyncTrainingResource

  client = trainer(service)

  async def lost(self, **values):
    raise ConnectionResetError('lost')

  with monkeypatch.context() as patched:
    patched.setattr(AsyncTrainingResource, 'optim_step', lost)
    with pytest.raises(ConnectionResetError):
      client.optim_step(ADAM).result()
  alone = trainer(service)
  assert equal(log_probs(client), log_probs(alone))


def wrong(**inputs):
  """An example of four tokens with other arrays."""
  usual = {'target_tokens': [3, 4, 5, 6], 'weights': [1.0] * 4}
  return types.Datum(
    model_input=types.ModelInput.from_ints([2, 3, 4, 5]), loss_fn_inputs=usual | inputs
  )


WRONG = {
  'data[0].target_tokens has the id 400 at position 1': wrong(target_tokens=[3, 400, 5, 6]),
  'data[0].target_tokens has the id -100': wrong(target_tokens=[-100, 4, 5, 6]),
  'data[0].weights has 3 values, but model_input has 4 tokens': wrong(weights=[1.0] * 3),
  'data[0].weights is nan at position 2': wrong(weights=[1.0, 1.0, float('nan'), 1.0]),
  'reads target_tokens and weights: leave out advantages': wrong(advantages=[1.0] * 4),
  'must be a dense tensor of one dimension': wrong(
    target_tokens=[[3, 4]] * 4, weights=[[1.0, 0.0]] * 4
  ),
  f'has {LENGTH + 1} tokens: from 1 to {LENGTH} fit': datum(0, LENGTH + 1),
  'model_input has the id 777 at position 0': types.Datum(
    model_input=types.ModelInput.from_ints([777]), loss_fn_inputs={'target_tokens': [3]}
  ),
  'only text is supported': types.Datum(
    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b'x', format='png')]),
    loss_fn_inputs={'target_tokens': [3]},
  ),
}  # fmt: skip


def test_faults_are_told_to_the_client_alone(server, service):
  client, other = trainer(service), trainer(service)
  user = tinker.types.RequestErrorCategory.User
  for message, example in WRONG.items():
    with pytest.raises(tinker.RequestFailedError) as found:
      client.forward_backward([datum(5), example], 'cross_entropy').result()
    assert message.replace('data[0]', 'data[1]') in str(found.value)
    assert found.value.category == user
  with pytest.raises(tinker.RequestFailedError, match='no step was made, because a forward_back'):
    client.optim_step(ADAM).result()
  failing = {
    'there are no gradients since the last optim_step': lambda: client.optim_step(ADAM),
    "loss_fn='dro' is not supported": lambda: client.forward([datum(0)], 'dro'),
    'cross_entropy has no settings': lambda: (
      client.forward([datum(0)], 'cross_entropy', {'x': 1.0})
    ),
    'the name .../x. is not supported': lambda: client.save_state('../x'),
    'beta1=2 must be from 0 to 1': lambda: client.optim_step(types.AdamParams(beta1=2.0)),
    'tinker://a/weights/b does not exist': lambda: client.load_state('tinker://a/weights/b'),
  }  # fmt: skip
  for message, call in failing.items():
    with pytest.raises(tinker.RequestFailedError, match=message):
      call().result()
  refused = {
    "base_model 'no/such' does not exist: this server has": lambda: (
      service.create_lora_training_client('no/such')
    ),
    'rank=0 must be from 1 to': lambda: trainer(service, rank=0),
    'the head gets no factors': lambda: trainer(service, train_attn=False, train_mlp=False),
    'is not a path of saved weights': lambda: service.create_sampling_client('tinker://../../etc'),
    'tinker://a/sampler_weights/b does not exist': lambda: (
      service.create_sampling_client('tinker://a/sampler_weights/b')
    ),
  }  # fmt: skip
  for message, call in refused.items():
    with pytest.raises(tinker.APIStatusError, match=message):
      call().result()
  sampler = service.create_sampling_client(base_model=NAME).result()
  prompt = types.ModelInput.from_ints([3] * (LENGTH - 28))
  with pytest.raises(tinker.APIStatusError, match='max_tokens=600 must be from 1 to'):
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=600)).result()
  with pytest.raises(tinker.RequestFailedError, match='has 484 tokens and requests 60 new ones'):
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=60)).result()
  with pytest.raises(tinker.RequestFailedError, match='the id 999 at position 0'):
    sampler.compute_logprobs(types.ModelInput.from_ints([999, 3])).result()
  with pytest.raises(tinker.AuthenticationError, match=r'send it as .*X-API-Key: KEY'):
    server.client('tml-other').create_sampling_client(base_model=NAME).result()
  # nothing of it has changed what the other client has
  steps(other, range(1))
  alone = trainer(service)
  steps(alone, range(1))
  assert equal(log_probs(other), log_probs(alone))
  assert 'Traceback' not in server.logged()


KILLED = """
import sys, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = service.create_lora_training_client(sys.argv[3], rank=4).result()
ids = types.ModelInput.from_ints([5] * 400)
data = [types.Datum(model_input=ids, loss_fn_inputs={'target_tokens': [6] * 400})] * 200
futures = [client.forward_backward(data, 'cross_entropy') for _ in range(3)]
sampler = service.create_sampling_client(base_model=sys.argv[3]).result()
values = types.SamplingParams(max_tokens=400, stop=[])
futures += [sampler.sample(types.ModelInput.from_ints([5]), 32, values) for _ in range(4)]
client.forward(data[:1], 'cross_entropy')
print('sent', flush=True)
input()
"""


def test_a_client_that_is_killed_stops_nobody(server, service):
  alone = trainer(service)
  steps(alone, range(1))
  wanted = log_probs(alone)
  command = [sys.executable, '-c', KILLED, server.url, KEY, NAME]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gone:
    assert gone.stdout.readline() == 'sent\n'
    gone.kill()
  client = trainer(service)
  steps(client, range(1))
  assert equal(log_probs(client), wanted)


def test_too_many_requests_wait_at_the_client(folder):
  """The client sends again what the server has no room for."""
  server = TrainingServer(folder, '--most_waiting=2')
  try:
    with server.client() as service:
      sampler = service.create_sampling_client(base_model=NAME).result()
      values = types.SamplingParams(max_tokens=4, seed=0)
      prompts = [types.ModelInput.from_ints([i, 5]) for i in range(3, 9)]
      futures = [sampler.sample(prompt, 1, values) for prompt in prompts]
      assert all(len(f.result().sequences[0].tokens) for f in futures)
    assert ' 429 ' in server.logged()
  finally:
    assert server.end() == 0


def test_the_page(folder, capsys, tmp_path):
  """The command and the script of docs/training_api.md, with a tiny model."""
  page = (runs.ROOT / 'docs' / 'training_api.md').read_text()
  assert 'sh server' in page
  (command,) = re.findall(r'^paxlite serve (.*)$', page, re.MULTILINE)
  assert command.split()[:2] == ['weights/smollm', '--train']
  server = TrainingServer(folder, '--name=smollm', key='')
  try:
    (code,) = re.findall(r'^```python\n(.*?)^```', page, re.DOTALL | re.MULTILINE)
    scope = {}
    exec(code.replace('http://127.0.0.1:8000', server.url), scope)
    scope['service'].close('success').result()
  finally:
    assert server.end() == 0
  lines = capsys.readouterr().out.splitlines()
  losses = [float(line.split()[1]) for line in lines[:4]]
  assert losses == sorted(losses, reverse=True)
  assert lines[4].endswith('/weights/after-four-steps')


def test_loops_of_the_cookbook(folder, monkeypatch, tmp_path):
  """The loops run as they are published, with other data, and another reward."""
  pytest.importorskip('tinker_cookbook')
  datasets = pytest.importorskip('datasets')
  transformers = pytest.importorskip('transformers')
  from tinker_cookbook import tokenizer_utils
  from tinker_cookbook.recipes import rl_loop, sl_loop

  name = 'Qwen/Qwen3-8B-Base'
  read = lambda: transformers.AutoTokenizer.from_pretrained(folder / 'hf')
  tokenizer_utils.register_tokenizer(name, read)
  messages = [
    [dict(role='user', content=f'Say {i}'), dict(role='assistant', content=f'And it is {i}.')]
    for i in range(12)
  ]
  rows = [dict(messages=m, question='What is it?', answer='#### 1') for m in messages]
  data = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
  monkeypatch.setattr(datasets, 'load_dataset', lambda *_: data)
  monkeypatch.setattr(rl_loop, 'get_reward', lambda text, _: text.count('e') / (len(text) or 1))
  monkeypatch.setenv('TINKER_API_KEY', KEY)
  server = TrainingServer(folder, f'--name={name}')
  usual = dict(base_url=server.url, model_name=name, lora_rank=4, batch_size=4, save_every=2)
  try:
    sl_loop.main(
      sl_loop.Config(**usual, log_path=str(tmp_path / 'sl'), max_length=100, learning_rate=0.02)
    )
    more = dict(group_size=4, max_tokens=24, loss_fn='importance_sampling', learning_rate=0.01)
    rl_loop.main(rl_loop.Config(**usual, **more, log_path=str(tmp_path / 'rl'), max_steps=3))
  finally:
    assert server.end() == 0
  losses = [row['train_mean_nll'] for row in runs.records(tmp_path / 'sl')]
  assert len(losses) == 3
  assert losses[2] < losses[0]
  rewards = [row['reward/total'] for row in runs.records(tmp_path / 'rl')]
  assert len(rewards) == 3
  for loop in ('sl', 'rl'):
    saved = runs.records(tmp_path / loop, 'checkpoints.jsonl')
    assert [row['name'] for row in saved] == ['000002', 'final']
    assert all(
      (server.adapters / row['state_path'].removeprefix('tinker://')).is_dir() for row in saved
    )


def test_wrong_starts(folder):
  with pytest.raises(AssertionError, match='has neither --drafts nor --allow_special_tokens'):
    TrainingServer(folder, '--drafts')
  with pytest.raises(AssertionError, match='the key must begin with tml-'):
    TrainingServer(folder, key=KEY[4:])
