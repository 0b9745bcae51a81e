"""The experiments of Pax's GPU scripts that fine-tune LLaMA 7B, 13B and 70B."""

from paxlite.experiments.finetuning import SFT, LoRA, ShardedLoRA
from paxlite.experiments.llama import LLaMA7B, LLaMA13B, LLaMA70B
from paxlite.experiments.registry import register

_WHERE = 'paxlite.experiments.finetuning'  # their dotted paths in the files of runs


@register
class LLaMA7BSFT(SFT, LLaMA7B):
  """Fine-tunes all weights of LLaMA 7B or Llama 2 7B on prompts and answers."""

  __module__ = _WHERE


@register
class LLaMA13BSFT(SFT, LLaMA13B):
  """Fine-tunes all weights of LLaMA 13B or Llama 2 13B on prompts and answers."""

  __module__ = _WHERE


@register
class LLaMA70BSFT(SFT, LLaMA70B):
  """Fine-tunes all weights of Llama 2 70B on prompts and answers."""

  __module__ = _WHERE


@register
class LLaMA7BLoRA(LoRA, LLaMA7B):
  """Fine-tunes LLaMA 7B or Llama 2 7B with low-rank factors."""

  __module__ = _WHERE


@register
class LLaMA13BLoRA(LoRA, LLaMA13B):
  """Fine-tunes LLaMA 13B or Llama 2 13B with low-rank factors."""

  __module__ = _WHERE


@register
class LLaMA70BLoRA(ShardedLoRA, LLaMA70B):
  """Fine-tunes Llama 2 70B with low-rank factors."""

  __module__ = _WHERE
