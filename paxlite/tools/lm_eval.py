"""paxlite lm-eval --model=paxlite --model_args=checkpoint=FOLDER --tasks=…

EleutherAI's evaluation harness on a checkpoint (the extra lm-eval). The command line is the
harness' own, with the model 'paxlite'; `paxlite lm-eval run --help` prints it. In Python, the call
is lm_eval.simple_evaluate(PaxliteLM(checkpoint=…), …).

Example:
  paxlite lm-eval --model=paxlite --model_args=checkpoint=logs/tiny --tasks=lambada_openai
"""

import collections
import sys
from collections.abc import Sequence

from paxlite.core import shell

try:
  from lm_eval.__main__ import cli_evaluate
  from lm_eval.api.model import LM
  from lm_eval.api.registry import register_model
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
  missing = f'the evaluation harness is missing ({e}): {shell.install("lm-eval")}'
  if __name__ == '__main__':
    raise SystemExit(f'error: {missing}') from None
  raise ImportError(missing) from None

from paxlite.core import command_line, paths
from paxlite.core.errors import located
from paxlite.eval.inference import load_checkpoint
from paxlite.eval.scoring import Continuation, Scorer
from paxlite.eval.zero_shot import continuation_of, continued
from paxlite.generation.decoding import Sampling

_MAX_GEN_TOKS = 256


@register_model('paxlite')
class PaxliteLM(LM):
  """The model of a job_log_dir or of imported weights, with the interface of the harness.

  A text that is longer than the model takes loses its beginning, as with the harness' own models.

  Args:
    checkpoint: The folder of the checkpoint.
    tokenizer: The tokenizer's file or folder, if it is not next to the weights.
    base_weights: The folder of the base weights of a LoRA run, if they were moved.
    dtype: Dtype of the weights, float32 or bfloat16; None: as trained.
    batch_tokens: Approximate number of tokens in a batch of log-likelihoods.
    batch_size, max_batch_size, device: Arguments that the harness passes; they are not used.
    attributes: Attributes of the experiment, such as DECODE_BATCH_SIZE=32.

  Raises:
    UserError: The checkpoint, the tokenizer or an attribute cannot be used.
  """

  def __init__(
    self,
    checkpoint: str,
    tokenizer: str = '',
    base_weights: str = '',
    dtype: str | None = None,
    batch_tokens: int = 4096,
    batch_size: object = None,
    max_batch_size: object = None,
    device: object = None,
    **attributes: object,
  ):
    super().__init__()
    overrides = {k: str(v) for k, v in attributes.items()}
    if dtype is not None:
      overrides['FPROP_DTYPE'] = dtype
    self._inference = load_checkpoint(checkpoint, tokenizer, overrides, base_weights)
    inference, e = self._inference, self._inference.experiment
    self._scorer = Scorer(
      inference.model, inference.params, inference.max_length, batch_tokens, inference.mesh, e.rules
    )

  @property
  def _prefix(self) -> list[int]:
    """The ids that replace an empty context: the start id, or EOS if there is none."""
    encoding = self._inference.encoding
    return encoding.start_ids or [max(0, self._inference.tokenizer.eos_id)]

  def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """Returns Σ ln p of each continuation, and whether its tokens are the likeliest."""
    asked = [self._continuation(*request.args) for request in requests]
    with command_line.progress('loglikelihood') as report:
      scores = self._scorer(asked, report)
    return [(s.log_likelihood, s.is_greedy) for s in scores]

  def _continuation(self, context: str, continuation: str) -> Continuation:
    if not context:
      return Continuation(self._prefix, self._inference.tokenizer.encode(continuation))
    return continuation_of(self._inference, context, continuation)

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Returns Σ ln p of each text, in windows as long as the model takes."""
    asked: list[Continuation] = []
    owners: list[int] = []
    for number, request in enumerate(requests):
      windows = get_rolling_token_windows(
        token_list=self._inference.tokenizer.encode(request.args[0]),
        prefix_token=self._prefix[-1],
        max_seq_len=self._inference.max_length,
        context_len=1,
      )
      for context, continuation in map(make_disjoint_window, windows):
        asked.append(Continuation(context, continuation))
        owners.append(number)
    sums = [0.0] * len(requests)
    with command_line.progress('loglikelihood_rolling') as report:
      for number, score in zip(owners, self._scorer(asked, report), strict=True):
        sums[number] += score.log_likelihood
    return sums

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Returns the text that the model writes after each context."""
    alike: dict[tuple, list[int]] = collections.defaultdict(list)
    for number, request in enumerate(requests):
      alike[_generation(request.args[1])].append(number)
    texts = [''] * len(requests)
    for (until, max_new_tokens, sampling), numbers in alike.items():
      texts_before = [requests[i].args[0] for i in numbers]
      prompts = [self._inference.encode(text) or self._prefix for text in texts_before]
      with command_line.progress('generate_until') as report:
        found = continued(self._inference, prompts, max_new_tokens, until, sampling, report)
      for number, text in zip(numbers, found, strict=True):
        texts[number] = text
    return texts

  def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
    """Returns the text that the chat template makes of a conversation, without the start id."""
    return self._inference.encoding.chat_text(chat_history, add_generation_prompt)

  @property
  def tokenizer_name(self) -> str:
    """Name of the tokenizer, which the harness uses for its caches."""
    return self._inference.tokenizer.path.replace('/', '__')


def _generation(arguments) -> tuple[tuple[str, ...], int, Sampling]:
  """Returns `until`, the largest number of tokens and the sampling of a request."""
  until = arguments.get('until') or []
  until = [until] if isinstance(until, str) else until
  most = arguments.get('max_gen_toks', arguments.get('max_new_tokens', _MAX_GEN_TOKS))
  temperature = float(arguments.get('temperature') or 0.0)
  if not arguments.get('do_sample', temperature > 0):
    return tuple(until), int(most), Sampling()
  top_p, top_k = float(arguments.get('top_p') or 1.0), int(arguments.get('top_k') or 0)
  return tuple(until), int(most), Sampling(temperature or 1.0, top_k, top_p)


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


if __name__ == '__main__':
  command_line.run(main)
