"""The messages of the client in protobuf: the bodies of forward_backward, and two results.

Only the fields that are read or written here are declared. A map is a repeated message of a key and
a value, which has the same bytes.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.core.errors import UserError
from paxlite.generation.request import Completion, TokenScore

TYPE = 'application/x-protobuf'
_STOP, _LENGTH = 0, 1  # of StopReason
_EMPTY = -99999.0  # the log-probability in a cell of TopkLogprobs that has no token
_DTYPES = {1: np.float32, 2: np.int64, 3: np.int32}  # by numbers of DType
# Fields as 'name number type'; '*' is repeated, '?' has a presence of its own, and a type with a
# capital letter is another message.
_MESSAGES = {
  'Text': ['tokens 1 bytes'],
  'Blob': [],
  'Chunk': ['encoded_text 1 Text', 'image 2 Blob', 'dmel 3 Blob'],
  'Tensor': ['dense 1 bytes', 'sparse_csr 2 Blob', 'dtype 3 int32', 'shape 4 *int64'],
  'Input': ['key 1 string', 'value 2 Tensor'],
  'Datum': ['model_input 1 *Chunk', 'loss_fn_inputs 2 *Input'],
  'Setting': ['number 1 double', 'text 2 string'],
  'NamedSetting': ['key 1 string', 'value 2 Setting'],
  'ForwardBackwardRequest': [
    'model_id 1 string', 'seq_id 2 int32', 'data 3 *Datum', 'loss_fn 4 string',
    'forward_only 6 bool', 'loss_fn_config_v2 7 *NamedSetting',
  ],
  'BatchedTensor': ['data 1 bytes', 'offsets 2 bytes', 'dtype 3 int32', 'trailing_shape 4 *int64'],
  'Output': ['key 1 string', 'value 2 BatchedTensor'],
  'ArrayRecord': ['type_tag 1 string', 'fields 2 *Output', 'num_datums 3 int64'],
  'Metric': ['key 1 string', 'value 2 double'],
  'ForwardBackwardOutput': [
    'loss_fn_output_type 1 string', 'loss_fn_outputs 2 *ArrayRecord', 'metrics 3 *Metric',
  ],
  'TopkLogprobs': ['token_ids 1 bytes', 'logprobs 2 bytes', 'k 3 uint32', 'length 4 uint32'],
  'SampledSequence': [
    'stop_reason 1 int32', 'tokens 2 bytes', 'logprobs 3 ?bytes',
    'topk_sampled_logprobs 4 TopkLogprobs',
  ],
  'SampleResponse': [
    'sequences 1 *SampledSequence', 'prompt_logprobs 2 ?bytes',
    'topk_prompt_logprobs 3 TopkLogprobs', 'prompt_cache_hit_tokens 4 int32',
  ],
}  # fmt: skip


@functools.cache
def _classes() -> dict[str, Any]:
  """Returns the classes of the messages, from a pool of their own."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  file = descriptor_pb2.FileDescriptorProto(
    name='paxlite_training_api.proto', package='paxlite', syntax='proto3'
  )
  for name, fields in _MESSAGES.items():
    message = file.message_type.add(name=name)
    for text in fields:
      field, number, kind = text.split()
      added = message.field.add(name=field, number=int(number))
      added.label = added.LABEL_REPEATED if kind[0] == '*' else added.LABEL_OPTIONAL
      if kind[0] == '?':
        added.proto3_optional, added.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f'_{field}')
      kind = kind.lstrip('*?')
      if kind in _MESSAGES:
        added.type, added.type_name = added.TYPE_MESSAGE, f'.paxlite.{kind}'
      else:
        added.type = added.Type.Value(f'TYPE_{kind.upper()}')
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  found = {n: pool.FindMessageTypeByName(f'paxlite.{n}') for n in _MESSAGES}
  return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


def forward_backward_request(body: bytes) -> Any:
  """Returns the ForwardBackwardRequest of a body; raises ValueError if it is none."""
  from google.protobuf.message import DecodeError

  message = _classes()['ForwardBackwardRequest']()
  try:
    message.ParseFromString(body)
  except DecodeError as e:
    raise ValueError(str(e)) from None
  return message


def tokens_of(chunks: Iterable[Any], what: str) -> np.ndarray:
  """Returns the ids of a model input, int32 [T]."""
  found = []
  for chunk in chunks:
    if not chunk.HasField('encoded_text') or len(chunk.encoded_text.tokens) % 4:
      raise UserError(f'{what} has a chunk that is no list of token ids: only text is supported')
    found.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
  return np.concatenate(found) if found else np.zeros(0, np.int32)


def array_of(tensor: Any, what: str) -> np.ndarray:
  """Returns the one-dimensional array of a Tensor."""
  if tensor.HasField('sparse_csr') or len(tensor.shape) > 1:
    raise UserError(f'{what} must be a dense tensor of one dimension: others are not supported')
  dtype = np.dtype(_DTYPES.get(tensor.dtype, np.void))
  if dtype == np.void or len(tensor.dense) % dtype.itemsize:
    raise UserError(f'{what} must be float32 or int64')
  return np.frombuffer(tensor.dense, dtype)


def forward_backward_output(log_probs: Sequence[np.ndarray], loss: float) -> bytes:
  """Returns the ForwardBackwardOutput of examples.

  Args:
    log_probs: The log-probabilities of the target tokens of each example, float32.
    loss: The sum of their losses.
  """
  offsets = np.cumsum([0, *(x.nbytes for x in log_probs)], dtype=np.int64)
  made = _classes()
  data = b''.join(x.tobytes() for x in log_probs)
  tensor = made['BatchedTensor'](data=data, offsets=offsets.tobytes(), dtype=1)
  fields = [made['Output'](key='logprobs', value=tensor)]
  record = made['ArrayRecord'](fields=fields, num_datums=len(log_probs))
  found = made['ForwardBackwardOutput'](
    loss_fn_output_type='ArrayRecord',
    loss_fn_outputs=[record],
    metrics=[made['Metric'](key='loss:sum', value=loss)],
  )
  return bytes(found.SerializeToString())


def sample_response(
  answers: Sequence[Completion], prompt_from: int | None, tops: tuple[int, int], length: int
) -> bytes:
  """Returns the SampleResponse of answers to one prompt.

  Args:
    answers: The answers. The first one has the scores of the prompt.
    prompt_from: The position of the prompt from which its tokens are scored; None: none is.
    tops: How many of the likeliest tokens are returned at a token of the prompt, and of an answer.
    length: The number of tokens of the prompt.
  """
  made = _classes()
  found = made['SampleResponse'](prompt_cache_hit_tokens=answers[0].shared)
  for answer in answers:
    ids = answer.ids + ([] if answer.end is None else [answer.end])
    scores = answer.scores[: len(ids)]
    sequence = found.sequences.add(
      stop_reason=_LENGTH if answer.finish == 'length' else _STOP,
      tokens=np.array(ids, np.int32).tobytes(),
      logprobs=np.array([s.log_prob for s in scores], np.float32).tobytes(),
    )
    if tops[1]:
      sequence.topk_sampled_logprobs.CopyFrom(_topk(scores, tops[1]))
  if prompt_from is not None:
    scored: list[TokenScore | None] = [None] * (length - len(answers[0].prompt_scores))
    scored += answers[0].prompt_scores
    values = [np.nan if score is None else score.log_prob for score in scored]
    found.prompt_logprobs = np.array(values, np.float32).tobytes()
    if tops[0]:
      found.topk_prompt_logprobs.CopyFrom(_topk(scored, tops[0]))
  return bytes(found.SerializeToString())


def _topk(scores: Sequence[TokenScore | None], k: int) -> Any:
  ids = np.zeros((len(scores), k), np.int32)
  log_probs = np.full((len(scores), k), _EMPTY, np.float32)
  for i, score in enumerate(scores):
    top: Mapping[int, float] = {} if score is None else score.top
    for j, (token, log_prob) in enumerate([*top.items()][:k]):
      ids[i, j], log_probs[i, j] = token, log_prob
  return _classes()['TopkLogprobs'](
    token_ids=ids.tobytes(), logprobs=log_probs.tobytes(), k=k, length=len(scores)
  )
