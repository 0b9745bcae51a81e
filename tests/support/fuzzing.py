"""Random and nearly valid input for all code that reads foreign files and flags.

Every case must give the right result or one clear UserError, on one line, with the name of the file
or flag. Everything else is a violation: another exception, an exit, more than 5 s or 2 GiB, files
left behind, or a result that does not follow from the input.
"""

import collections
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import resource
import signal
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from unittest import mock

import hypothesis
import numpy as np
import safetensors.numpy
import tokenizers
import zstandard
from hypothesis import strategies as st

from paxlite import main
from paxlite.chats.chat_format import ChatFormat
from paxlite.checkpointing.source import find_source
from paxlite.checkpointing.variables import stored_variables
from paxlite.config.attributes import attribute_types, parse
from paxlite.core.errors import UserError
from paxlite.data import documents, flat_tokens, packaged, streams
from paxlite.data.tokenizer import open_tokenizer
from paxlite.eval import decoding, eval_tasks
from paxlite.experiments.registry import find
from paxlite.finetuning.chats import sft
from paxlite.generation import inference
from paxlite.programs.launch import build_experiment
from paxlite.tokenization import flat_tokens_writer
from paxlite.weights.commands import import_weights
from paxlite.weights.tensor_names import HUGGING_FACE

Files = Mapping[str, bytes]

_SECONDS, _BYTES = 5, 2 << 30  # of the processor, as other tests may run beside these
_LONGEST = 60  # seconds of a case that waits


_LateError = type('_LateError', (BaseException,), {})  # no code catches it


@contextlib.contextmanager
def limits() -> Iterator[None]:
  """Turns a hang or excessive memory into an error of the case that causes it."""

  def late(*_):
    raise _LateError

  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
  most = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _BYTES, most[1]))
  for number in (signal.SIGPROF, signal.SIGALRM):
    signal.signal(number, late)
  signal.setitimer(signal.ITIMER_PROF, _SECONDS)
  signal.setitimer(signal.ITIMER_REAL, _LONGEST)
  try:
    yield
  except _LateError:
    raise AssertionError(f'more than {_SECONDS} s, or a wait of {_LONGEST} s') from None
  finally:
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
      signal.setitimer(timer, 0)
    resource.setrlimit(resource.RLIMIT_AS, most)


def outcome(call: Callable[[], Any], *places: str) -> Any:
  """Returns the result of `call`, or its UserError, which must clearly name one of `places`."""
  try:
    with limits():
      return call()
  except UserError as e:
    check_message(str(e), *places)
    return e


def check_message(text: str, *places: str) -> None:
  assert len(text.splitlines()) == 1, f'an error of several lines, or none: {text!r}'
  assert any(p.lower() in text.lower() for p in places), f'an error without a place: {text!r}'


_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
_NUMBERS = (0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**9, 10**12, 10**400, 0.5, -0.0, 1e300, 1e-300)
_ODD = (
  '', ' ', '"', "'", '[', ']', '[1,', '[,]', '"[1, 1, 1]"', '[1,1,1]', '[a,b]', '{[]: 1}', '{1}',
  'None', 'true', '1e400', '-inf', 'nan', '0x' + 'f' * 5000, '9' * 5000, '1_000', '1e6', '1j', '..',
  '\0', '\ud800', 'é\r\n', '../..', '/', 'x' * 300, 'a{99999999999999999999}', '(' * 3000, '(?P<a>',
  '~', '~x', 'gs://a', 'sft:~/a',
  '[' * 3000, '-' * 5000 + '1', '[' * 90 + ']' * 90, "b'x'", '*', '%s{}', '{{', '=', packaged.VOCAB,
)  # fmt: skip
_JSON = st.recursive(
  st.none() | st.booleans() | st.sampled_from((*_NUMBERS, *_ODD)) | st.floats() | _TEXT,
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
  max_leaves=4,
)


def typed(expected: Any) -> st.SearchStrategy:
  """Returns a strategy for values of a parameter's type."""
  origin, args = typing.get_origin(expected), typing.get_args(expected)
  if origin is Literal:
    return st.sampled_from(args)
  if origin in (typing.Union, types.UnionType):
    return st.one_of(*map(typed, args))
  if origin is Annotated:  # a path; keeps only texts that are read unchanged
    values = typed(args[0])
    if not any(map(callable, args[1:])):  # only a kind or bounds
      return values
    return values.filter(lambda text: not re.match(r'([a-z_]+:)?~|[^/]*://', text))
  if origin is list:
    return st.lists(typed(args[0]), max_size=4)
  integers = st.integers(-2, 66) | st.integers(1 - 2**100, 2**100 - 1)
  finite = st.floats(allow_nan=False, allow_infinity=False) | integers.map(float)
  texts = _TEXT | st.sampled_from(_ODD)
  known = {
    bool: st.booleans(), int: integers, float: finite, str: texts, types.NoneType: st.none(),
    dict: st.dictionaries(texts, finite | texts, max_size=3),
  }  # fmt: skip
  return known[expected]


_EXPERIMENTS = (
  'TinyGPT', 'DemoGPT', 'LLaMA7BSFT', 'LLaMA7BLoRA', 'SyntheticGLaM126M64E', 'FlatTokens126M',
)  # fmt: skip
_FLAG_NAMES = (
  'fdl_config', 'fiddler', 'mode', 'dry_run', 'nodry_run', 'tfds_data_dir', 'num_hosts', 'flagfile',
  'jax_profiler_port', 'compiled_step', 'undefok', 'job_log_dir', 'fdl.', 'fdl.NUM_LAYER', '',
)  # fmt: skip


@st.composite
def _values(draw) -> tuple[str, dict[str, Any]]:
  experiment = draw(st.sampled_from(_EXPERIMENTS))
  known = attribute_types(find(experiment))
  names = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4, unique=True))
  return experiment, {name: draw(typed(known[name])) for name in names}


@st.composite
def _arguments(draw) -> list[str]:
  experiment, values = draw(_values())
  texts = _TEXT | st.sampled_from(_ODD)
  arguments = [f'--fdl.{k}={draw(st.just(repr(v)) | texts)}' for k, v in values.items()]
  for name in draw(st.lists(st.sampled_from(_FLAG_NAMES) | _TEXT, max_size=2)):
    arguments.append(f'--{name}' + draw(st.just('') | texts.map('={}'.format)))
  return ['main', f'--fdl_config={experiment}', '--dry_run', *arguments]


def check_flags(arguments: list[str]) -> bool:
  """Parses the command line, up to the point where the run would begin."""
  said = io.StringIO()
  with (
    mock.patch('paxlite.experiments.description.dry_run', str),
    mock.patch('paxlite.programs.run.Run'),
    mock.patch('paxlite.programs.training.train'),
    mock.patch('paxlite.programs.evaluation.evaluate'),
    mock.patch('paxlite.eval.decoding.decode'),
    mock.patch('paxlite.processes.join.join'),
    mock.patch('jax.profiler.start_server'),
    mock.patch.dict(os.environ),
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(said),
    limits(),
  ):
    code = main.main(arguments)
  assert code == (2 if said.getvalue() else 0)
  if code:
    check_message(said.getvalue(), 'error: ')
  return code == 0


def check_values(case: tuple[str, dict[str, Any]]) -> bool:
  """Checks that values of the right types are read as written, and then built or refused."""
  name, values = case
  cls = find(name)
  for key, value in values.items():
    found = parse(cls, key, repr(value))
    assert (found, type(found)) == (value, type(value)), f'{key}={value!r} is read as {found!r}'
  texts = {key: repr(value) for key, value in values.items()}
  experiment = outcome(lambda: build_experiment(name, [], texts), *attribute_types(cls))
  if isinstance(experiment, UserError):
    return False
  assert all(getattr(experiment, key) == value for key, value in values.items())
  return not isinstance(outcome(experiment.task, *attribute_types(cls)), UserError)


_HOW = st.sampled_from(('write', 'insert', 'cut', 'remove', 'copy', 'drop', 'json', 'json', 'json'))
_SOME = st.binary(min_size=1, max_size=9) | st.sampled_from((b'\xff' * 8, b'\0' * 8, b'\n', b'"'))
_AT = st.integers(0, 4000)
_EDITS = st.lists(st.tuples(_HOW, st.integers(0, 30), _AT, _SOME, _JSON), max_size=3)


def edited(files: Files, edits: Sequence[tuple]) -> dict[str, bytes]:
  """Returns the files after the edits: (kind, which file, where, bytes, a value for its JSON)."""
  files = dict(files)
  for kind, which, at, some, value in edits:
    if not files:
      break
    names = sorted(files)
    name = names[which % len(names)]
    old = files.pop(name)
    cut = at % (len(old) + 1)
    left = {'remove': cut + len(some), 'write': cut + len(some), 'cut': len(old)}.get(kind, cut)
    if kind == 'json':
      files[name] = _edited_json(old, at, value)
    elif kind == 'copy':
      files[name] = files.get(names[at % len(names)], old)
    elif kind != 'drop':
      files[name] = old[:cut] + (some if kind in ('write', 'insert') else b'') + old[left:]
  return files


def _edited_json(old: bytes, at: int, value: Any) -> bytes:
  """Returns a JSON or safetensors file with one JSON value changed, moved or removed."""
  size = 0 if old.startswith(b'{') else int.from_bytes(old[:8], 'little')
  try:
    tree = json.loads(old[8 : 8 + size] if size else old)
  except (ValueError, RecursionError):
    return old
  nodes = list(_nodes(tree))
  if not nodes or at % 50 == 0:
    tree = value
  else:
    where, key = nodes[at % len(nodes)]
    other, name = nodes[at * 7 % len(nodes)]
    if at % 5 == 0:
      del where[key]
    else:
      where[key] = json.loads(json.dumps(other[name])) if at % 5 == 1 else value
  text = json.dumps(tree).encode()
  return len(text).to_bytes(8, 'little') + text + old[8 + size :] if size else text


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
  for key in tree if isinstance(tree, dict) else range(len(tree) if isinstance(tree, list) else 0):
    yield tree, key
    yield from _nodes(tree[key])


def _write(folder: pathlib.Path, files: Files) -> None:
  folder.mkdir(exist_ok=True)
  for name, content in files.items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
  with tempfile.TemporaryDirectory(prefix='fuzz-') as folder:
    yield pathlib.Path(folder)


@functools.cache
def _flat(format: str) -> Files:
  """Returns the files of a dataset; seqax's format has chunks of 16 tokens."""
  with _folder() as folder, mock.patch.object(flat_tokens_writer, '_CHUNK', 16):
    writer = flat_tokens_writer.FlatTokensWriter(str(folder), 'train', 1000, format)
    for n in (5, 1, 20, 11):
      writer.write(np.arange(n) * 31 + n, [n])
    writer.close()
    files = [p for p in (folder / 'train').rglob('*') if p.is_file()]
    return {str(p.relative_to(folder / 'train')): p.read_bytes() for p in files}


def _rows(files: Files, kind: str) -> Any:
  """Returns (rows, the largest id) of a dataset, or its UserError."""
  with _folder() as folder:
    _write(folder / 'train', files)

    def read():
      rows = flat_tokens.FlatTokenRows(str(folder), 'train', 8, kind)
      return rows.read(np.arange(min(len(rows), 8))), rows.max_token_id

    return outcome(read, folder.name)


def check_flat_tokens(case: tuple) -> bool:
  """Reads rows of a damaged dataset; ids may differ only if stored tokens differ, as in seqax's."""
  format, kind, edits = case
  files = edited(_flat(format), edits)
  found = _rows(files, kind)
  if isinstance(found, UserError):
    return False
  rows, most = found
  expected, _ = _rows(_flat(format), kind)
  stored = lambda files: {k: v for k, v in files.items() if re.search(r'\.bin$|/\d+$', k)}
  same = stored(files) == stored(_flat(format))
  for key, value in rows.items():
    assert (value.dtype, value.shape[1], value.min() >= 0) == (expected[key].dtype, 8, True), key
    assert not same or np.array_equal(value, expected[key]), key
  assert max(rows['ids'].max(), rows['labels'].max()) <= most
  return True


_CHAT = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
_GOOD = st.text(min_size=1, max_size=20)
_MESSAGES = st.lists(
  st.fixed_dictionaries({'role': st.sampled_from(('user', 'assistant')), 'content': _GOOD})
)
_LINES = {
  'documents': {'text': _GOOD}, 'sft': {'inputs': _GOOD, 'targets': _GOOD},
  'sft chat': {'messages': _MESSAGES}, 'prompts': {'inputs': _GOOD},
  'prompts chat': {'messages': _MESSAGES}, 'lambada': {'context': _GOOD, 'continuation': _GOOD},
  'task': {'question': _GOOD, 'a': _GOOD, 'b': _GOOD, 'label': st.sampled_from(('0', '1'))},
}  # fmt: skip
_SPEC = {
  'kind': 'multiple_choice', 'files': [], 'doc_to_text': 'Q: {{question}}', 'until': [],
  'doc_to_choice': ['{{a}}', '{{b}}'], 'doc_to_target': '{{label}}', 'target_pattern': '(.*)',
}  # fmt: skip
_RAW = (
  b'{"text": ' + b'[' * 5000 + b']' * 5000 + b'}', b'{"text": "\\ud800"}', b'\xef\xbb\xbf{}',
  b'{"text": "a", "n": ' + b'9' * 5000 + b'}', b'{"text": "a", "n": NaN}', b'{"text": "\xff"}',
  b'{"text": "\\u0000\\n"}', b'{"a\\nb": 1}', b'{}', b'[]', b'null', b'\0', b'{"text": 1e999}',
)  # fmt: skip
_PACK = {'': bytes, '.gz': gzip.compress, '.xz': lzma.compress, '.zst': zstandard.compress}


@st.composite
def _lines(draw) -> tuple:
  reader = draw(st.sampled_from(sorted(_LINES)))
  good = st.fixed_dictionaries(_LINES[reader])
  odd = st.dictionaries(st.sampled_from((*_LINES[reader], 'prediction')) | _TEXT, _JSON, max_size=3)
  dumped = lambda record: json.dumps(record).encode()
  raw = lambda record: json.dumps(record, ensure_ascii=False).encode('utf-8', 'surrogatepass')
  line = good.map(dumped), good.map(raw), odd.map(raw), st.sampled_from(_RAW) | st.binary()
  lines = st.lists(st.one_of(line[:2]), max_size=4) | st.lists(st.one_of(line), max_size=4)
  content = draw(st.sampled_from((b'\n', b'\r\n', b'\n\n'))).join(draw(lines))
  edits = [draw(st.just([]) | st.just([]) | _EDITS) for _ in range(2)]
  return reader, draw(st.sampled_from(sorted(_PACK))), content, *edits


def _records(content: bytes) -> list[dict[str, Any]] | None:
  """Returns the objects in JSON lines, read by Python's json; None if a line is not an object."""
  try:
    lines = [json.loads(x.decode()) for x in content.split(b'\n') if x.strip()]
    json.dumps(lines, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    return None
  return lines if all(isinstance(line, dict) for line in lines) else None


@functools.cache
def _model() -> inference.Inference:
  experiment = find('DemoGPT')(MAX_SEQ_LEN=64, CHAT_TEMPLATE=_CHAT)
  tokenizer = open_tokenizer(packaged.VOCAB)
  return inference.TextModel(experiment, None, None, None, tokenizer, 64)


def _read_lines(reader: str, file: str, spec: str) -> Any:
  """Returns the ids of all documents, or the number of records."""
  if reader == 'documents':
    stream = streams.StreamInput(
      documents.DocumentSource([file], packaged.VOCAB, 8192), 16, 4, shuffle=False
    )
    batches = list(stream.eval_batches(slice(None)))
    return [i for b in batches for i in b['labels'][b['weights'] > 0].tolist()]
  if reader.startswith('sft'):
    rows = sft.SftRows([file], packaged.VOCAB, 64, 8192, chat_template=_CHAT, too_long='skip')
    assert rows.read(np.arange(len(rows)))['weights'].any(1).all()
    return rows.num_examples + rows.num_skipped
  if reader.startswith('prompts'):
    return len(decoding.read_prompts([file], _model()))
  (task,) = eval_tasks.read_tasks([spec if reader == 'task' else f'lambada:{file}'])
  return len(task.examples)


def check_lines(case: tuple) -> bool:
  """Reads documents, examples, prompts and tasks."""
  reader, suffix, content, edits, packed_edits = case
  content = edited({'content': content}, edits).get('content', b'')
  name = f'case.jsonl{suffix}'
  files = {name: _PACK[suffix](content)}
  if reader == 'task':
    files['task.json'] = json.dumps(_SPEC | {'files': [name]}).encode()
  changed = edited(files, packed_edits)
  with _folder() as folder:
    _write(folder, changed)
    read = lambda: _read_lines(reader, str(folder / name), str(folder / 'task.json'))
    found = outcome(read, folder.name)
  refused, records = isinstance(found, UserError), _records(content)
  if changed != files:
    return not refused
  if reader == 'documents' and records and all(isinstance(r.get('text'), str) for r in records):
    vocabulary = _model().tokenizer
    ids = [[*vocabulary.encode(r['text']), vocabulary.eos_id] for r in records if r['text']]
    wanted = [i for document in ids for i in document]
    assert found == wanted if wanted else refused
  else:
    assert refused or (records is not None and found == len(records))
  return not refused


@functools.cache
def _tokenizer() -> Files:
  """Returns a tokenizer.json with every kind of part, and a chat configuration for it."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0, 'b': 1, 'ab': 2}, [('a', 'b')]))
  made.add_special_tokens(['<s>'])
  made.normalizer = tokenizers.normalizers.Replace(' ', 'b')
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 3)]
  )
  made.enable_padding(length=4)
  made.enable_truncation(3)
  configuration = {'bos_token': '<s>', 'eos_token': {'content': '<s>'}, 'chat_template': _CHAT}
  return {
    'tokenizer.json': made.to_str().encode(),
    'tokenizer_config.json': json.dumps(configuration).encode(),
    'chat_template.jinja': _CHAT.encode(),
  }


def check_tokenizer(edits: Sequence[tuple]) -> bool:
  """Reads a damaged tokenizer; the package tokenizers gives the expected encoding."""
  files = edited(_tokenizer(), edits)
  with _folder() as folder:
    _write(folder, files)
    path = str(folder / 'tokenizer.json')

    def read():
      tokenizer = open_tokenizer(path)
      chat = ChatFormat('', path).render([{'role': 'user', 'content': 'ab'}], True)
      ids = tokenizer.encode('ab bab')
      ends = [i % 9 for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
      tokenizer.decode([*ids, *range(5), *ends])
      return ids, chat

    found = outcome(read, folder.name, 'the chat template')
  if isinstance(found, UserError):
    return False
  ids, chat = found
  theirs = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  theirs.no_padding()
  theirs.no_truncation()
  assert ids == theirs.encode('ab bab', add_special_tokens=False).ids
  if files == _tokenizer():
    assert chat == 'user: ab\n'
  return True


_SHAPES = dict.fromkeys(('query', 'key', 'value', 'post', 'gate', 'up', 'down'), (8, 8))
_SHAPES |= dict.fromkeys(('attention_norm', 'ffn_norm', 'final_norm'), (8,))
_SHAPES |= dict.fromkeys(('embedding', 'head'), (16, 8))
_CONFIG = {
  'model_type': 'llama', 'hidden_size': 8, 'intermediate_size': 8, 'num_hidden_layers': 1,
  'num_attention_heads': 2, 'num_key_value_heads': 2, 'head_dim': 4, 'vocab_size': 16,
  'max_position_embeddings': 32, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'eos_token_id': 2,
  'tie_word_embeddings': False, 'sliding_window': None, 'torch_dtype': 'float32',
  'rope_scaling': {'rope_type': 'llama3', 'rope_theta': 1e4, 'factor': 8.0, 'low_freq_factor': 1.0,
                   'high_freq_factor': 4.0, 'original_max_position_embeddings': 16},
}  # fmt: skip


def _tensors() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {HUGGING_FACE[k].format(i=0): rng.random(s, np.float32) for k, s in _SHAPES.items()}


def _elements(tensors: Mapping[str, np.ndarray]) -> bytes:
  """Returns all elements of the tensors in an order that does not depend on their layout."""
  return np.sort(np.concatenate([t.view(np.uint32).ravel() for t in tensors.values()])).tobytes()


@functools.cache
def _hugging_face() -> Files:
  """Returns the files of a folder with two shards."""
  tensors = list(_tensors().items())
  index = {name: f'{i % 2}.safetensors' for i, (name, _) in enumerate(tensors)}
  return {
    'config.json': json.dumps(_CONFIG).encode(),
    'generation_config.json': b'{"eos_token_id": [2, 3]}',
    'model.safetensors.index.json': json.dumps({'weight_map': index}).encode(),
    '0.safetensors': safetensors.numpy.save(dict(tensors[::2])),
    '1.safetensors': safetensors.numpy.save(dict(tensors[1::2])),
  }


def _imported(files: Files) -> Any:
  """Returns (values of the experiment, variables) of an import, or its UserError."""
  with _folder() as folder:
    _write(folder / 'weights', files)
    flags = ['--from=hf', f'--path={folder / "weights"}', f'--to={folder / "to"}']
    with contextlib.redirect_stdout(io.StringIO()):
      error = outcome(lambda: import_weights.main(flags), folder.name)
    left = sorted(p.name for p in folder.iterdir())
    assert left == (['weights'] if error else ['to', 'weights']), left
    if error:
      return error
    for file in (folder / 'to').glob('tokenizer.json'):
      open_tokenizer(str(file))
    variables = {k: v.whole() for k, v in stored_variables(folder / 'to' / 'state').items()}
    return inference.experiment_of(find_source(str(folder / 'to'))).values(), variables


def check_hugging_face(edits: Sequence[tuple]) -> bool:
  """Reads a damaged folder; the package safetensors gives the expected tensors."""
  files = edited(_hugging_face(), edits)
  found = _imported(files)
  if isinstance(found, UserError):
    return False
  index = files.get('model.safetensors.index.json')
  named = files if index is None else json.loads(index)['weight_map'].values()
  tensors: dict[str, np.ndarray] = {}
  for name in {n for n in named if n.endswith('.safetensors')}:
    tensors |= safetensors.numpy.load(files[os.path.normpath(name)])
  if not found[0]['SEPARATE_EMBEDDING']:
    del tensors['lm_head.weight']
  assert _elements(found[1]) == _elements(tensors)
  return True


_FORMATS, _KINDS = st.sampled_from(('memmap', 'seqax')), ('stream', 'packed', 'sequences')
TARGETS: dict[str, tuple[st.SearchStrategy, Callable[[Any], bool]]] = {
  'flags': (_arguments(), check_flags), 'values': (_values(), check_values),
  'flat_tokens': (st.tuples(_FORMATS, st.sampled_from(_KINDS), _EDITS), check_flat_tokens),
  'lines': (_lines(), check_lines), 'tokenizer': (_EDITS, check_tokenizer),
  'hugging_face': (_EDITS, check_hugging_face),
}  # fmt: skip


def run(target: str, cases: int, seed: int | None = None) -> tuple[int, int]:
  """Returns how many of a target's cases had right results, and how many had clear errors.

  Raises the exception of the smallest case that violates the property. Without a seed, the cases
  are the same each time.
  """
  strategy, check = TARGETS[target]
  counts: collections.Counter[bool] = collections.Counter()
  each = hypothesis.given(strategy)(lambda case: counts.update([check(case)]))
  quiet = dict(database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
  settings = hypothesis.settings(max_examples=cases, derandomize=seed is None, **quiet)
  settings(each if seed is None else hypothesis.seed(seed)(each))()
  return counts[True], counts[False]
