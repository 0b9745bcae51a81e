"""paxlite lm-eval --model=paxlite --model_args=checkpoint=FOLDER --tasks=…

Runs EleutherAI's evaluation harness on a checkpoint (extra lm-eval). The command line is the
harness's, with the model 'paxlite'; `paxlite lm-eval run --help` prints it. In Python:
lm_eval.simple_evaluate(PaxliteLM(checkpoint=…), …).

Example:
  paxlite lm-eval --model=paxlite --model_args=checkpoint=logs/tiny --tasks=lambada_openai
"""

import collections
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core import shell

try:
  from lm_eval.__main__ import cli_evaluate
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
  raise ImportError(
    f'the evaluation harness is missing ({e}): {shell.install("lm-eval")}'
  ) from None

from paxlite.cli import command_line
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.eval.answer_writer import AnswerWriter
from paxlite.eval.scoring import Continuation, Scorer
from paxlite.eval.zero_shot import contexts_of
from paxlite.files import paths
from paxlite.generation.inference import load_checkpoint

_MAX_GEN_TOKS = 256
_TAG = 'CONTINUE_FINAL_MESSAGE_TAG '  # marks where an unfinished message ends

# Arguments of a generation: the names of the most new tokens, the first of which counts, those that
# are understood, and others with the values that mean what is done anyway.
_LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
_UNDERSTOOD = ('until', 'do_sample', 'temperature', 'top_k', 'top_p', 'repetition_penalty')
_HARMLESS: dict[str, tuple] = {
  'num_beams': (1,), 'num_return_sequences': (1,), 'use_cache': (True, False),
  'early_stopping': (False,), 'min_p': (0,), 'length_penalty': (1,),
}  # fmt: skip


@register_model('paxlite')
class PaxliteLM(TemplateLM):
  """The model of a run or of imported weights, with the harness' interface.

  Texts become ids as in HFLM, the harness' own class for transformers. A text that is longer than
  the model takes loses its beginning, also as there. Raises UserError if the checkpoint, the
  tokenizer or an attribute cannot be used.

  Args:
    checkpoint: The folder of the checkpoint.
    tokenizer: The tokenizer's file or folder, if it is not next to the weights.
    base_weights: The folder of the base weights of a LoRA run, if they were moved.
    dtype: Dtype of the weights, float32 or bfloat16; None: as trained.
    batch_tokens: Approximate number of tokens in a batch of log-likelihoods.
    max_length: The most tokens of a text; None: as many as the model has positions.
    add_bos_token: Whether texts begin with BOS; None: as the tokenizer says.
    prefix_token_id: The id that stands for an empty context; None: BOS, or EOS if there is none.
    batch_size, max_batch_size, device: Arguments that the harness passes; they are not used.
    attributes: Attributes of the experiment, such as DECODE_BATCH_SIZE=32.
  """

  def __init__(
    self,
    checkpoint: str,
    tokenizer: str = '',
    base_weights: str = '',
    dtype: str | None = None,
    batch_tokens: int = 4096,
    max_length: int | None = None,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    batch_size: object = None,
    max_batch_size: object = None,
    device: object = None,
    **attributes: object,
  ):
    super().__init__()
    overrides = {k: str(v) for k, v in attributes.items()}
    if dtype is not None:
      overrides['FPROP_DTYPE'] = dtype
    if max_length is not None:
      overrides['MAX_SEQ_LEN'] = str(max_length)
    self._inference = load_checkpoint(checkpoint, tokenizer, overrides, base_weights)
    inference, e = self._inference, self._inference.experiment
    self.max_length = inference.max_length
    self._contexts = contexts_of(inference, add_bos_token, prefix_token_id)
    self._write = AnswerWriter(self._inference)
    self._scorer = Scorer(
      inference.model, inference.params, self.max_length, batch_tokens, inference.mesh, e.rules
    )

  @property
  def eot_token_id(self) -> int | None:
    """The EOS of the tokenizer; None if it has none."""
    return self._inference.tokenizer.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The id that stands for an empty context."""
    return self._contexts.needed_prefix

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: object
  ) -> list[int]:
    """Returns the ids of a text; add_special_tokens says whether it begins as texts do."""
    return self._contexts.encode(string, add_special_tokens)

  def _loglikelihood_tokens(
    self,
    requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
    disable_tqdm: bool = False,
    **kwargs: object,
  ) -> list[tuple[float, bool]]:
    for (context, continuation), before, after in requests:
      if not before or not after:
        what = f'continuation {continuation[:40]!r}' if before else f'context {context[:40]!r}'
        raise UserError(f'the {what} adds no token, so it cannot be scored')
    asked = [Continuation(before, after) for _, before, after in requests]
    with command_line.progress('loglikelihood') as report:
      scores = self._scorer(asked, report)
    return [(s.log_likelihood, s.is_greedy) for s in scores]

  def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
    """Returns Σ ln p of each text, in windows as long as the model takes."""
    asked: list[Continuation] = []
    owners: list[int] = []
    for number, request in enumerate(requests):
      windows = get_rolling_token_windows(
        token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length, context_len=1,
      )  # fmt: skip
      for context, continuation in map(make_disjoint_window, windows):
        asked.append(Continuation(context, continuation))
        owners.append(number)
    sums = [0.0] * len(requests)
    with command_line.progress('loglikelihood_rolling') as report:
      for number, score in zip(owners, self._scorer(asked, report), strict=True):
        sums[number] += score.log_likelihood
    return sums

  def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
    """Returns the model's text after each context."""
    alike: dict[tuple, list[int]] = collections.defaultdict(list)
    penalty = self._inference.settings.sampling.repetition_penalty
    for number, request in enumerate(requests):
      alike[_generation(request.args[1], penalty)].append(number)
    answers = [''] * len(requests)
    eos = self.eot_token_id
    end = () if eos is None else (self._inference.tokenizer.decode_marked([eos]),)
    for (until, max_new_tokens, sampling), numbers in alike.items():
      prompts = [self._prompt(requests[i].args[0]) for i in numbers]
      endings = (*until, *(text for text in end if text not in until))
      with command_line.progress('generate_until') as report:
        found = self._write(prompts, max_new_tokens, endings, sampling, report)
      for number, answer in zip(numbers, found, strict=True):
        answers[number] = answer.text
    return answers

  def _prompt(self, context: str) -> list[int]:
    tokenizer = self._inference.tokenizer
    bos = tokenizer.special_id('bos_token')  # and not what stands for an empty context
    has_bos = bos is not None and context.startswith(tokenizer.decode_marked([bos]))
    return self.tok_encode(context, not has_bos) or [self.prefix_token_id]

  def apply_chat_template(
    self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """Returns the text that the chat template makes of a conversation.

    Without the prompt of an answer, the last message is one to be continued, so that the text ends
    with it. A template that refuses a message of the system gets the others, as in the harness.
    """
    try:
      return self._chat_text(list(chat_history), add_generation_prompt)
    except UserError:
      others = [m for m in chat_history if m['role'] != 'system']
      if len(others) == len(chat_history):
        raise
      return self._chat_text(others, add_generation_prompt)

  def _chat_text(self, messages: list[Mapping[str, str]], prompt: bool) -> str:
    if prompt or not messages:
      return self._inference.encoding.chat_text(messages, prompt)
    last = messages[-1]
    marked = [*messages[:-1], {**last, 'content': last['content'] + _TAG}]
    text = self._inference.encoding.chat_text(marked, False)
    before, mark, after = text.rpartition(_TAG.strip())
    if not mark:
      raise UserError('the chat template leaves out the last message, which is to be continued')
    return before if after.startswith(' ') else before.rstrip()

  def chat_template(self, chat_template: bool | str = False) -> str | None:
    """Returns the chat template, which the harness notes; None if none is asked for."""
    return self._inference.encoding.chat_format.text if chat_template else None

  @property
  def tokenizer_name(self) -> str:
    """Name of the tokenizer, which the harness uses for its caches."""
    return self._inference.tokenizer.path.replace('/', '__')


def _generation(
  arguments: Mapping[str, Any], penalty: float
) -> tuple[tuple[str, ...], int, Sampling]:
  """Returns `until`, the largest number of tokens and the sampling of a request.

  Args:
    arguments: The arguments of the request.
    penalty: The repetition penalty of a request that states none.

  Raises:
    UserError: An argument is not understood, so that the text might be another than expected.
  """
  fields = Fields(arguments, 'generation_kwargs')
  until = fields.get('until') or []
  until = [until] if isinstance(until, str) else until
  stated = fields.one_of(*_LENGTHS)
  most = _MAX_GEN_TOKS if stated is None else int(stated)
  temperature = float(fields.get('temperature') or 0.0)
  is_drawn = fields.get('do_sample')
  penalty = float(fields.get('repetition_penalty') or penalty)
  top_p, top_k = float(fields.get('top_p') or 1.0), int(fields.get('top_k') or 0)
  for name, value in fields.left().items():
    if value not in _HARMLESS.get(name, ()):
      raise UserError(
        f'generation_kwargs: {name}={value!r} is not supported; '
        f'{", ".join((*_LENGTHS[:1], *_UNDERSTOOD))} are'
      )
  if is_drawn and not temperature:
    raise UserError('generation_kwargs: do_sample=True needs a temperature above 0')
  if not (temperature > 0 if is_drawn is None else is_drawn):
    return tuple(until), most, Sampling(repetition_penalty=penalty)
  return tuple(until), most, Sampling(temperature, top_k, top_p, penalty)


def main(argv: Sequence[str]) -> None:
  if [*argv] in (['--help'], ['-h']):
    print(f'usage: {(__doc__ or "").strip()}')
    return
  for argument, after in zip(argv, [*argv[1:], ''], strict=True):
    name, equals, value = argument.partition('=')
    if name == '--output_path':
      with located(name):
        paths.local(value if equals else after)  # the harness would make a folder called gs:
  sys.argv[1:] = argv  # which the harness reads
  cli_evaluate()
