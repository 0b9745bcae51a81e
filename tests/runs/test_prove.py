"""Exports with a proof, and everything that can be wrong with what is proven."""

import json
import pathlib
import shutil
import struct

import numpy as np
import pytest

from paxlite.checkpointing.checksums import write_checksums
from paxlite.compilation.versions import code_of_paxlite
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.llama import LLaMA
from paxlite.proof import prove
from paxlite.weights.commands import export_weights
from paxlite.weights.folder import write_weights
from paxlite.weights.layout import decoder_entries
from paxlite.weights.tensor_names import HUGGING_FACE
from tests.support.completions import serving

for package in ('gguf', 'safetensors', 'tokenizers', 'jinja2'):
  pytest.importorskip(package)
from gguf import GGUFReader  # noqa: E402

TEMPLATE = '{% for m in messages %}{{ m.content }}</s>{% endfor %}'


class RandomTensors:
  """Tensors of random numbers; without a seed, of NaN."""

  def __init__(self, entries, seed):
    self.shapes = {entry.theirs: entry.shape for entry in entries}
    self._seed, self._rng = seed, np.random.default_rng(seed)

  def read(self, name):
    if self._seed is None:
      return np.full(self.shapes[name], np.nan, np.float32)
    width = 1.0 if name == 'lm_head.weight' else 0.3  # so that some tokens are likely
    return self._rng.normal(0, width, self.shapes[name]).astype(np.float32)


def weights(to: pathlib.Path, seed: int | None = 0) -> pathlib.Path:
  """Writes weights of a tiny Llama with the tokenizer of the demo."""
  sizes = dict(MODEL_DIMS=32, NUM_HEADS=2, NUM_KV_HEADS=1, DIMS_PER_HEAD=16, HIDDEN_DIMS=64)
  experiment = LLaMA(
    NUM_LAYERS=2, VOCAB_SIZE=8192, MAX_SEQ_LEN=96, MAX_POSITION_EMBEDDINGS=96, EOS_IDS=[2], **sizes
  )
  entries = decoder_entries(experiment, HUGGING_FACE, 'half')
  source = to.with_name(f'{to.name}_tokenizer')
  source.mkdir()
  shutil.copyfile(pathlib.Path(packaged.__path__[0]) / 'text8k.model', source / 'tokenizer.model')
  (source / 'chat_template.jinja').write_text(TEMPLATE)
  silent = lambda done, total: None
  write_weights(to, experiment, entries, RandomTensors(entries, seed), source, silent)
  return to


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """Weights, and their exports with proofs."""
  folder = tmp_path_factory.mktemp('proofs')
  source = weights(folder / 'w')
  for name, flags in {'hf': ['--to=hf'], 'gguf': ['--to=gguf', '--type=q8_0']}.items():
    export_weights.main([str(source), *flags, f'--path={folder / name}', '--proof'])
  return folder


def copied(made: pathlib.Path, name: str, tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(made / name, tmp_path / name))


def refused(match: str, *argv: object) -> None:
  with pytest.raises(UserError, match=match) as error:
    prove.main([str(word) for word in argv])
  assert '\n' not in str(error.value)


@pytest.mark.slow
def test_the_exports_are_proven(made, capsys):
  prove.main([str(made / 'hf')])
  out = capsys.readouterr().out
  assert 'all log-probabilities are bit-equal' in out
  assert 'all bits of 21 tensors, tokenizer (8,192 tokens), chat template' in out
  assert 'Not proven' not in out
  prove.main([str(made / 'gguf')])
  out = capsys.readouterr().out
  assert 'all bits of 21 tensors' in out
  assert 'within rounding' in out
  assert 'bit-equal' not in out


@pytest.mark.slow
def test_other_forms_are_proven_as_far_as_they_say(made, capsys):
  prove.main([str(made / 'w'), f'--proof={made / "gguf" / "proof.json"}'])
  out = capsys.readouterr().out
  assert 'all log-probabilities are bit-equal' in out
  assert 'Not proven: the bits of the weights, which it has as paxlite f32 and the proof as' in out
  file = next((made / 'gguf').glob('*.gguf'))
  prove.main([str(file), f'--proof={made / "hf" / "proof.json"}'])
  out = capsys.readouterr().out
  assert 'within rounding' in out
  assert 'has as gguf q8_0 and the proof as hf f32' in out


def test_a_value_of_a_tensor_that_has_changed_is_found(made, tmp_path):
  folder = copied(made, 'hf', tmp_path)
  file = folder / 'model.safetensors'
  content = bytearray(file.read_bytes())
  header = json.loads(content[8 : 8 + int.from_bytes(content[:8], 'little')])
  name = 'model.layers.1.mlp.up_proj.weight'
  start = 8 + int.from_bytes(content[:8], 'little') + header[name]['data_offsets'][0]
  content[start] ^= 1  # the lowest bit of one float32
  file.write_bytes(content)
  refused(f'weights have changed: {name}$', folder)

  folder = copied(made, 'gguf', tmp_path)
  file = next(folder.glob('*.gguf'))
  (stored,) = (t for t in GGUFReader(file).tensors if t.name == 'blk.1.ffn_up.weight')
  content = bytearray(file.read_bytes())
  content[stored.data_offset + 2] ^= 1
  file.write_bytes(content)
  refused(r'weights have changed: blk.1.ffn_up.weight$', folder)


@pytest.mark.slow
def test_a_tokenizer_a_template_and_a_config_that_have_changed_are_named(made, tmp_path):
  folder = copied(made, 'gguf', tmp_path / 'tokens')
  file = next(folder.glob('*.gguf'))
  content = file.read_bytes()
  assert content.count('▁beginning'.encode()) == 1
  file.write_bytes(content.replace('▁beginning'.encode(), '▁beginninh'.encode()))
  refused('the tokenizer has changed', folder)

  folder = copied(made, 'gguf', tmp_path / 'template')
  file = next(folder.glob('*.gguf'))
  changed = TEMPLATE.replace('m.content', 'm.role   ')
  assert len(changed) == len(TEMPLATE)
  file.write_bytes(file.read_bytes().replace(TEMPLATE.encode(), changed.encode()))
  refused('the chat template has changed$', folder)

  folder = copied(made, 'gguf', tmp_path / 'config')
  file = next(folder.glob('*.gguf'))
  field = lambda base: b'llama.rope.freq_base' + struct.pack('<If', 6, base)
  content = file.read_bytes()
  assert content.count(field(1e4)) == 1
  file.write_bytes(content.replace(field(1e4), field(5e5)))
  refused('the config has changed: rope_theta is 500000.0, but 10000.0 in the proof$', folder)

  folder = copied(made, 'hf', tmp_path / 'template')
  (folder / 'chat_template.jinja').write_text(changed)
  refused('the chat template has changed$', folder)

  folder = copied(made, 'hf', tmp_path / 'config')
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | {'rope_theta': 5e5}))
  refused('the config has changed: rope_theta is 500000.0, but 10000.0 in the proof$', folder)


@pytest.mark.slow
def test_other_weights_are_another_model(made, tmp_path):
  other = weights(tmp_path / 'other', seed=1)
  refused("log-probabilities of .* the weights are another model's", other,
          f'--proof={made / "hf" / "proof.json"}')  # fmt: skip


def test_weights_without_numbers_are_neither_proven_nor_exported_with_a_proof(made, tmp_path):
  broken = weights(tmp_path / 'broken', seed=None)
  refused('differ by nan', broken, f'--proof={made / "hf" / "proof.json"}')
  with pytest.raises(UserError, match='nothing to prove'):
    export_weights.main([str(broken), '--to=hf', f'--path={tmp_path / "out"}', '--proof'])
  assert not (tmp_path / 'out').exists()


def test_proofs_that_cannot_be_used(made, tmp_path):
  refused('proof.json is missing: --proof=FILE names', made / 'w')
  refused('a server needs --proof=FILE', 'http://127.0.0.1:9')
  refused('127.0.0.1:9/v1/models does not answer', 'http://127.0.0.1:9',
          f'--proof={made / "hf" / "proof.json"}')  # fmt: skip
  refused('nowhere does not exist', tmp_path / 'nowhere', f'--proof={made / "hf" / "proof.json"}')
  proof = json.loads((made / 'hf' / 'proof.json').read_text())
  damaged = tmp_path / 'proof.json'
  for change in ({'proof': 2}, {'replies': []}, {'facts': {}}):
    damaged.write_text(json.dumps(proof | change))
    refused('not a proof of version 1' if 'proof' in change else 'is damaged', made / 'hf',
            f'--proof={damaged}')  # fmt: skip


def test_a_proof_says_what_was_exported(made):
  proof = json.loads((made / 'gguf' / 'proof.json').read_text())
  assert proof['experiment']['experiment'] == 'paxlite.experiments.llama.LLaMA'
  assert proof['experiment']['values']['MODEL_DIMS'] == 32
  assert proof['checkpoint']['name'] == 'w'
  assert {'jax', 'paxlite'} <= proof['versions']['packages'].keys()
  assert proof['code'] == code_of_paxlite()
  assert proof['data'] is None  # weights without a run
  for reply in proof['replies']:
    assert len(reply['ids']) == len(reply['log_probabilities']) + 1
    assert len(reply['continuation']) == len(reply['top']) == 16
    assert all(top[0][0] == token for top, token in zip(
      reply['top'], reply['continuation'], strict=True))  # fmt: skip


@pytest.mark.slow
def test_a_proof_of_a_run_has_its_step_and_data(made, tmp_path):
  checkpoint = tmp_path / 'run' / 'checkpoints' / 'checkpoint_00000012'
  shutil.copytree(made / 'w', checkpoint)
  (checkpoint / 'experiment.json').rename(tmp_path / 'run' / 'experiment.json')
  (checkpoint / 'data').mkdir()
  data = {'step': 12, 'fingerprint': 3}
  (checkpoint / 'data' / 'metadata').write_text(json.dumps(data))
  write_checksums(checkpoint)
  export_weights.main([str(tmp_path / 'run'), '--to=hf', f'--path={tmp_path / "hf"}', '--proof'])
  proof = json.loads((tmp_path / 'hf' / 'proof.json').read_text())
  assert proof['data'] == data
  assert proof['checkpoint']['name'] == 'checkpoint_00000012'
  assert proof['facts'] == json.loads((made / 'hf' / 'proof.json').read_text())['facts']
  prove.main([str(tmp_path / 'run'), f'--proof={tmp_path / "hf" / "proof.json"}'])


def answers(proof, shift=0.0, wrong_token=False, count=0):
  """Returns a function that answers as a server of the model of a proof."""

  def answer(body):
    (reply,) = [r for r in proof['replies'] if r['text'] == body['prompt']]
    tops = [{str(t): p + shift for t, p in top} for top in reply['top']]
    tokens = ['?'] * 16 if wrong_token else reply['tokens']
    for token, top, named in zip(tokens, tops, reply['top'], strict=True):
      top[token] = named[0][1] + shift
    chosen = [top[token] for token, top in zip(tokens, tops, strict=True)]
    told = {'tokens': tokens, 'token_logprobs': chosen, 'top_logprobs': tops}
    usage = {'prompt_tokens': len(reply['ids']) + count}
    return {'choices': [{'text': ''.join(tokens), 'logprobs': told}], 'usage': usage}

  return answer


@pytest.mark.slow
def test_a_server_is_proven_by_what_it_continues(made, capsys):
  place = made / 'hf' / 'proof.json'
  proof = json.loads(place.read_text())
  for shift, said in ((0.0, 'bit-equal'), (0.1, 'within rounding: 0.1 of 0.4')):
    with serving(answers(proof, shift)) as url:
      prove.main([f'{url}/v1', f'--proof={place}'])
    out = capsys.readouterr().out
    assert said in out
    assert 'Not proven: the config' in out
  with serving(answers(proof, 0.7)) as url:
    refused('differ by 0.7, but rounding explains only 0.4', url, f'--proof={place}')
  with serving(answers(proof, count=1)) as url:
    refused('other token ids: the tokenizer differs', url, f'--proof={place}')
  with serving(lambda body: {'choices': [{'text': 'x', 'logprobs': None}]}) as url:
    refused('returns no log-probabilities', url, f'--proof={place}')


@pytest.mark.slow
def test_other_texts_are_another_model_where_the_proof_is_sure(made):
  """The first token is likelier than the second by more than rounding explains."""
  place = made / 'hf' / 'proof.json'
  proof = json.loads(place.read_text())
  margins = [r['top'][0][0][1] - r['top'][0][1][1] for r in proof['replies']]
  assert max(margins) > 0.8
  with serving(answers(proof, wrong_token=True)) as url:
    refused('is continued differently:', url, f'--proof={place}')


def test_a_proof_needs_a_tokenizer_and_nothing_is_written_without(tmp_path):
  source = weights(tmp_path / 'w')
  (source / 'tokenizer.model').unlink()
  (source / 'checksums.json').unlink()
  write_checksums(source)
  with pytest.raises(UserError, match='no tokenizer is set'):
    export_weights.main([str(source), '--to=hf', f'--path={tmp_path / "out"}', '--proof'])
  assert not (tmp_path / 'out').exists()
