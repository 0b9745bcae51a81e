"""Published models on random tokens, to measure speed, for scripts/example_slurm_maxtext.sub."""

from paxlite.experiments import gemma, llama
from paxlite.experiments.datasets import Synthetic
from paxlite.experiments.registry import register


@register
class SyntheticLLaMA7B(Synthetic, llama.LLaMA7B):
  """python -m paxlite.main --fdl_config=SyntheticLLaMA7B --job_log_dir=LOGS"""


@register
class SyntheticLLaMA13B(Synthetic, llama.LLaMA13B):
  """python -m paxlite.main --fdl_config=SyntheticLLaMA13B --job_log_dir=LOGS"""


@register
class SyntheticLLaMA70B(Synthetic, llama.LLaMA70B):
  """python -m paxlite.main --fdl_config=SyntheticLLaMA70B --job_log_dir=LOGS"""


@register
class SyntheticLLaMA3_8B(Synthetic, llama.LLaMA3_8B):
  """python -m paxlite.main --fdl_config=SyntheticLLaMA3_8B --job_log_dir=LOGS"""


@register
class SyntheticMistral7B(Synthetic, llama.Mistral7B):
  """python -m paxlite.main --fdl_config=SyntheticMistral7B --job_log_dir=LOGS"""


@register
class SyntheticGemma2B(Synthetic, gemma.Gemma2B):
  """python -m paxlite.main --fdl_config=SyntheticGemma2B --job_log_dir=LOGS"""


@register
class SyntheticGemma7B(Synthetic, gemma.Gemma7B):
  """python -m paxlite.main --fdl_config=SyntheticGemma7B --job_log_dir=LOGS"""
