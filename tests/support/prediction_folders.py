"""Folders of models with modules that predict further tokens, what they compute, and changes."""

import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from safetensors import safe_open

from paxlite.weights.commands import export_weights
from tests.support.imported import flat, unrolled, variables_of

D, V, T, WEIGHT = 32, 96, 20, 0.3


def tensors_of(path) -> dict[str, np.ndarray]:
  with safe_open(path / 'model.safetensors', 'np') as f:
    return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict


def write(path, tensors, **config) -> None:
  """Writes tensors, and changes config.json."""
  from safetensors.numpy import save_file

  save_file(tensors, path / 'model.safetensors', {'format': 'pt'})
  file = path / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | config))


def computed(function, *args):
  """Compiles and calls a function, with products in float32."""
  with jax.default_matmul_precision('highest'):
    return jax.jit(function)(*args)


def changed(published, to, change, **config):
  """Returns a folder with changed tensors."""
  to.mkdir()
  for file in published.path.iterdir():
    if file.suffix == '.json':
      (to / file.name).write_text(file.read_text())
  tensors = dict(published.tensors)
  change(tensors)
  write(to, tensors, **config)
  return to


def drop(tensors, *parts: str) -> None:
  for name in [n for n in tensors if any(part in n for part in parts)]:
    del tensors[name]


def ids_of() -> np.ndarray:
  return np.random.default_rng(0).integers(3, V, (2, T + 1)).astype(np.int32)


def their_logits(model, modules, ids, number: int):
  """Returns the logits of the model and of each module, in its training: it reads true tokens."""
  import torch

  out = model(ids, output_hidden_states=True)
  x, found = out.hidden_states[-1], [out.logits]
  for i in range(number):
    positions = torch.arange(i + 1, ids.shape[1])[None]
    x = modules.forward_layer(i, x[:, :-1], positions, None, input_ids=ids[:, i + 1 :])
    found.append(modules._project_to_logits(x))
  return found


def our_logits(model, params, ids):
  """Returns the same of paxlite's model."""

  def logits(params):
    bound = model.bind({'params': params})
    x = bound.hidden(ids)
    return [*map(bound.logits, [x, *bound.predicted(x, ids)])]

  return computed(logits, params)


def check_logits(found, wanted) -> None:
  for i, (got, logits) in enumerate(zip(found, wanted, strict=True)):
    expected = logits.detach().numpy()
    largest = np.abs(expected).max()
    np.testing.assert_allclose(got[:, : T - i], expected, rtol=0, atol=1e-5 * largest)


def gradient(parameter):
  return parameter.data * 0 if parameter.grad is None else parameter.grad


def put_gradients(published, model, modules, number: int, layers: int) -> dict[str, np.ndarray]:
  """Returns the gradients of all but the modules' own weights, by the names of the whole model."""
  trunk = published.whole.model
  pairs = [(trunk.embed_tokens, model.model.embed_tokens), (trunk.norm, model.model.norm)]
  pairs += zip(trunk.layers, model.model.layers, strict=False)
  pairs += [(trunk.layers[layers + i], modules.layers[i].mtp_block) for i in range(number)]
  pairs.append((published.whole.lm_head, model.lm_head))
  for to, source in pairs:
    of = dict(source.named_parameters())
    for name, p in to.named_parameters():
      p.data = gradient(of[name])
  path = published.path.parent / 'gradients'
  published.whole.save_pretrained(path)
  return tensors_of(path)


def check_loss(logits, ids, experiment, params):
  """Compares the loss of logits with ours, calls backward, and returns our gradients by name."""
  import torch

  labels = torch.tensor(ids[:, 1:], dtype=torch.long)
  xents = [
    torch.nn.functional.cross_entropy(x.flatten(0, 1), labels[:, i:].flatten())
    for i, x in enumerate(logits)
  ]
  loss = xents[0] + WEIGHT / len(xents[1:]) * sum(xents[1:])
  loss.backward()
  task = fdl.build(experiment.build_task())
  batch = dict(ids=ids[:, :-1], labels=ids[:, 1:], weights=np.ones((2, T), np.float32))
  (value, _), grads = computed(
    jax.value_and_grad(task.loss_and_metrics, has_aux=True), params, batch
  )
  assert float(value) == pytest.approx(loss.item(), rel=1e-5)
  return unrolled(flat(grads))


def check_gradients(found, gradients, entries, tolerance: float) -> None:
  """Compares gradients by the names of variables, which it takes out of `found`."""
  for name, wanted in variables_of(entries, gradients.__getitem__).items():
    got, scale = found.pop(name), np.abs(wanted).max()
    assert scale > 0, name
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale + 1e-9, err_msg=name)


def exported(published, imported, folder) -> dict:
  """Exports imported weights, compares the tensors bit for bit, and returns config.json."""
  export_weights.main(['--to=hf', f'--checkpoint={imported}', f'--path={folder}'])
  back = tensors_of(folder)
  assert back.keys() == published.tensors.keys()
  for name, tensor in published.tensors.items():
    assert np.array_equal(back[name], tensor), name
  return json.loads((folder / 'config.json').read_text())
