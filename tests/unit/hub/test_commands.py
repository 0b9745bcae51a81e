"""`paxlite` with names of the Hub: import, finetune, generate, chat and export --push."""

import json
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from tests.rules.test_docs import blocks
from tests.support import runs
from tests.support.hub_server import Fault
from tests.unit.hub.conftest import tiny_llama

WORDS = ['alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta']
# SmolLM's experiment asks for one device, and that of a Llama of no known size for eight
ONE_DEVICE = 'ICI_MESH_SHAPE=[1,1,1]', 'DCN_MESH_SHAPE=[1,1,1]'
SHORT = (
  'MAX_SEQ_LEN=32', 'PERCORE_BATCH_SIZE=2', 'MAX_STEPS=2', 'SUMMARY_INTERVAL_STEPS=1',
  'FPROP_DTYPE=float32', 'LEARNING_RATE=1e-2', 'LR_COS_WARMUP=1', *ONE_DEVICE,
)  # fmt: skip


def paxlite(*words: str, here, code: int = 0, env: dict[str, str] | None = None) -> str:
  """Runs a command in the folder `here`; returns its output, or its one line of an error."""
  command = [sys.executable, '-m', 'paxlite', *words]
  environment = runs.environment() | {'PYTHONPATH': str(runs.ROOT)} | (env or {})
  done = runs.ended(command, environment, cwd=here)
  assert done.returncode == code, f'{words}\n{done.stdout}\n{done.stderr}'
  if code == 0:
    return done.stdout
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: '), done.stderr
  return line


@pytest.fixture
def here(hub, tmp_path):
  hub.add('org/tiny', tiny_llama())
  chats = [dict(inputs=f'{a} goes before', targets=f' {b}') for a, b in pairwise(WORDS)]
  hub.add(
    'org/chats', {'train.jsonl': ''.join(json.dumps(c) + '\n' for c in chats).encode()}, 'dataset'
  )
  return tmp_path / 'here'


def test_weights_are_imported_by_name(here, hub, tmp_path):
  command = ['import', 'org/tiny', '--to=weights/tiny']
  paxlite('import', 'org/nothing', '--to=weights/tiny', here=here, code=2)
  assert not (here / 'weights').exists()
  assert 'The model is a LLaMA.' in paxlite(*command, here=here)
  asked = len(hub.requests)
  line = paxlite(*command, here=here, code=2)
  assert '--to=weights/tiny exists already' in line
  assert len(hub.requests) == asked
  (tmp_path / 'tiny').mkdir()
  for name, content in tiny_llama().items():
    (tmp_path / 'tiny' / name).write_bytes(content)
  paxlite('import', str(tmp_path / 'tiny'), '--to=weights/other', here=here)
  read = lambda name, file: json.loads((here / 'weights' / name / file).read_text())
  tiny, other = read('tiny', 'experiment.json'), read('other', 'experiment.json')
  assert tiny.pop('imported_from') == 'org/tiny'
  assert other.pop('imported_from') == str(tmp_path / 'tiny')
  assert tiny == other
  tiny, other = read('tiny', 'checksums.json'), read('other', 'checksums.json')
  del tiny['experiment.json'], other['experiment.json']
  assert tiny == other


@pytest.mark.slow
def test_the_commands_of_the_docs(here, hub):
  """Runs the blocks that begin with ```sh hub."""
  hub.add('HuggingFaceTB/SmolLM2-135M', tiny_llama())
  hub.repos['dataset', 'you/capitals'] = hub.repos['dataset', 'org/chats']
  hub.tokens['hf_good'] = {'name': 'you'}
  for page in ('weights', 'fine_tuning'):
    lines = '\n'.join(blocks(runs.ROOT / f'docs/{page}.md', 'sh hub')).splitlines()
    assert lines
    for line in lines:
      words = [*shlex.split(line)[1:], *(ONE_DEVICE if 'finetune' in line else ())]
      paxlite(*words, here=here, env={'HF_TOKEN': 'hf_good'})
  assert hub.repos['model', 'you/smollm2'].private


@pytest.mark.slow
def test_a_model_is_fine_tuned_by_its_name_and_continues(here, hub):
  command = [
    'finetune', 'org/tiny', '--method=lora', 'TRAIN_FILES=hf:org/chats', *SHORT,
  ]  # fmt: skip
  paxlite(*command, here=here)
  run = here / 'runs/tiny-lora'
  assert sorted(runs.losses(run)) == [1, 2]
  values = json.loads((run / 'experiment.json').read_text())['values']
  assert values['CHECKPOINT_RESTORE_PATH'] == 'org/tiny'
  assert values['TRAIN_FILES'] == ['hf:org/chats']
  asked = len(hub.requests)
  offline = {'HF_HUB_OFFLINE': '1'}
  paxlite(*command, 'MAX_STEPS=4', here=here, env=offline)
  assert sorted(runs.losses(run)) == [1, 2, 3, 4]
  assert len(hub.requests) == asked
  written = paxlite(
    'generate', 'runs/tiny-lora', 'alpha', '--max_new_tokens=4', here=here, env=offline
  )
  first = paxlite('generate', 'org/tiny', 'alpha', '--max_new_tokens=4', here=here)
  assert written.strip()
  assert first.strip()
  hub.add('org/tiny', tiny_llama(seed=1))  # the run stays on the weights that it began with
  last = paxlite('generate', 'runs/tiny-lora', 'alpha', '--max_new_tokens=4', here=here)
  assert last == written
  other = paxlite('generate', 'org/tiny', 'alpha', '--max_new_tokens=4', here=here)
  assert other != first
  code = "import paxlite; print(paxlite.load('org/tiny').generate('alpha', max_new_tokens=4))"
  of_python = subprocess.run(
    [sys.executable, '-c', code], cwd=here, env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert of_python.stdout.strip() == other.strip(), of_python.stderr
  assert len(hub.asked('GET .*(lfs|resolve)')) == len(set(hub.asked('GET .*(lfs|resolve)')))


@pytest.mark.slow
def test_a_model_with_images_goes_back_whole(here, hub, tmp_path):
  """The export of a model that came by its name has every file of the Hub that describes it."""
  pytest.importorskip('transformers')
  from tests.support.image_models import model_with_images, save

  folder = tmp_path / 'theirs'
  save(model_with_images('Gemma3'), folder, max_shard_size='40KB')
  assert (folder / 'model.safetensors.index.json').is_file()
  (folder / 'preprocessor_config.json').write_text('{"image_processor_type": "Gemma3"}')
  files = {path.name: path.read_bytes() for path in folder.iterdir()}
  hub.add('org/images', files | {'onnx/model.onnx': b'no', 'README.md': b'no'})
  paxlite('import', 'org/images', '--to=weights/images', here=here)
  said = paxlite('export', 'weights/images', '--to=hf', '--path=whole', here=here)
  assert 'The whole model of ' in said
  whole = {path.name: path.read_bytes() for path in (here / 'whole').iterdir()}
  assert whole == files


def test_mistakes_are_said_before_weights_are_downloaded(here, hub):
  cases = (
    (['TRAIN_FILES=no.jsonl'], 'no.jsonl'),
    (['TRAIN_FILES=hf:org/chat'], 'nor a public dataset at'),
    (['TRAIN_FILES=hf:org/chats', 'LEARNING_RATE=fast'], 'LEARNING_RATE'),
    (['TRAIN_FILES=hf:org/chats:test'], 'no split test'),
  )
  for words, said in cases:
    assert said in paxlite('finetune', 'org/tiny', *words, here=here, code=2)
    assert not hub.asked('org/tiny')
  assert 'PROMPT is missing' in paxlite('generate', 'org/tiny', here=here, code=2)
  assert not hub.asked('org/tiny')
  line = paxlite('generate', 'org/tniy', 'x', here=here, code=2)
  assert 'org/tniy: neither a path here nor a public model at' in line
  assert not (here / 'runs').exists()


@pytest.mark.slow
def test_a_killed_import_leaves_nothing_and_goes_on(here, hub, tmp_path):
  hub.faults[:] = [Fault('GET /lfs', pause=0.05, times=9)]
  command = [sys.executable, '-m', 'paxlite', 'generate', 'org/tiny', 'alpha', '--max_new_tokens=2']
  env = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  process = subprocess.Popen(command, cwd=here, env=env)
  while not hub.sent or max(hub.sent.values()) < 1 << 17:
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not [*(tmp_path / 'cache').rglob('checksums.json')]
  hub.faults.clear()
  assert paxlite(*command[3:], here=here).strip()
  assert [*(tmp_path / 'cache').rglob('checksums.json')]


@pytest.mark.slow
def test_two_processes_import_once(here, hub, tmp_path):
  code = "from paxlite.hub.models import imported; print(*imported('org/tiny'))"
  hub.faults[:] = [Fault('GET /lfs', pause=0.01, times=9)]
  env = runs.environment() | {'PYTHONPATH': str(runs.ROOT)}
  both = [
    subprocess.Popen(
      [sys.executable, '-c', code], cwd=here, env=env, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for _ in range(2)
  ]  # fmt: skip
  (one, said), (other, also) = (process.communicate() for process in both)
  assert one == other
  assert one.startswith(str(tmp_path / 'cache')), said
  assert (said + also).count('org/tiny is imported: ') == 1


@pytest.fixture
def exported(here, hub):
  paxlite('import', 'org/tiny', '--to=weights/tiny', here=here)
  hub.tokens['hf_good'] = {'name': 'someone', 'orgs': [{'name': 'lab'}]}
  return ['export', 'weights/tiny', '--to=hf', '--path=exported/tiny']


@pytest.mark.slow
def test_an_export_is_uploaded_when_asked_to(here, hub, exported):
  token = {'HF_TOKEN': 'hf_good'}
  said = paxlite(*exported, '--push=lab/mine', '--private', here=here, env=token)
  assert f'{hub.address}/lab/mine is new, and private' in said
  repo = hub.repos['model', 'lab/mine']
  assert repo.private
  (files,) = repo.commits.values()
  folder = here / 'exported/tiny'
  right = {
    p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob('*') if p.is_file()
  }
  card = files.pop('README.md').decode()
  assert files == right
  assert card.startswith('---\nlibrary_name: transformers\n---\n# mine\n')

  again = [*exported[:3], '--path=exported/again', '--push=lab/mine']
  stale = 'model-00001-of-00002.safetensors', 'pytorch_model.bin', 'adapter_config.json'
  others = {'README.md': b'mine', 'eval.json': b'1', 'q8.gguf': b'2', 'old/model.safetensors': b'3'}
  hub.repos['model', 'lab/mine'].commit(files | others | dict.fromkeys(stale, b'old'))
  said = paxlite(*again, here=here, env=token)
  assert 'is new' not in said
  assert all(name in said for name in stale)
  left = repo.commits[repo.at('main')]
  assert {name: left[name] for name in others} == others
  assert not {*stale} & {*left}, 'transformers would read them before the new ones'


@pytest.mark.slow
def test_nothing_is_uploaded_or_exported_where_that_cannot_succeed(here, hub, exported):
  hub.add('lab/public', {'a': b''})
  commits = lambda: sum(len(repo.commits) for repo in hub.repos.values())
  before, good = commits(), {'HF_TOKEN': 'hf_good'}
  for words, env, said in (
    (['--push=lab/mine'], {}, '--push=lab/mine needs a write token: set HF_TOKEN'),
    (['--push=lab/mine'], {'HF_TOKEN': 'hf_bad'}, 'refuses the token: renew HF_TOKEN'),
    (['--push=other/mine'], good, 'the token belongs to someone, who is not in other'),
    (['--push=mine'], good, '--push=mine must be org/name'),
    (['--push=lab/public', '--private'], good, 'is public: choose another name'),
    (['--private'], good, '--private is for --push=ORG/NAME'),
    (['--push=lab/mine'], good | {'HF_HUB_OFFLINE': '1'}, 'HF_HUB_OFFLINE is set'),
  ):
    assert said in paxlite(*exported, *words, here=here, env=env, code=2)
    assert not (here / 'exported').exists()
  paxlite(*exported, here=here, env=good)
  assert commits() == before
  assert not hub.asked('POST|PUT')


@pytest.mark.slow
def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(here, hub, exported):
  hub.faults[:] = [Fault('POST .*commit', 403, times=9)]
  line = paxlite(*exported, '--push=lab/mine', here=here, env={'HF_TOKEN': 'hf_good'}, code=2)
  assert 'exported/tiny was exported but not uploaded: lab/mine' in line
  assert line.endswith('To try again: hf upload lab/mine exported/tiny')
  assert not hub.repos['model', 'lab/mine'].commits
  assert (here / 'exported/tiny/model.safetensors').is_file()
