"""The keys of generation_config.json, which says how the publisher of a model generates text."""

import logging
import math
import pathlib
from collections.abc import Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel

log = logging.getLogger('paxlite')

_PENALTY = 'repetition_penalty'
# Read elsewhere: the ends (families.py), and BOS, which the tokenizer says.
_ELSEWHERE = 'eos_token_id', 'bos_token_id'
# How tokens are drawn, which whoever generates says: the likeliest one is taken unless TEMPERATURE
# or a request asks for more. The values are kept for exports.
_DRAWN = 'do_sample', 'temperature', 'top_k', 'top_p', 'min_p'
_HARMLESS: Mapping[str, Sequence[str]] = {
  'padding, which is never seen by other tokens': ('pad_token_id',),
  'lengths, which each command and request says': ('max_length', 'max_new_tokens', 'max_time'),
  'without effect where there is one beam': ('early_stopping', 'length_penalty'),
  'of encoders': ('decoder_start_token_id', 'encoder_no_repeat_ngram_size'),
  'the same most likely token, and the same draws': ('renormalize_logits', 'remove_invalid_values'),
  'how fast transformers is': (
    'assistant_confidence_threshold', 'assistant_early_exit', 'assistant_lookbehind',
    'cache_config', 'cache_implementation', 'compile_config', 'disable_compile', 'is_assistant',
    'low_memory', 'max_matching_ngram_size', 'num_assistant_tokens',
    'num_assistant_tokens_schedule', 'prefill_chunk_size', 'prompt_lookup_num_tokens',
    'target_lookbehind', 'use_cache',
  ),
  'what a call in Python returns': (
    'output_attentions', 'output_hidden_states', 'output_logits', 'output_scores',
    'return_dict_in_generate', 'return_legacy_cache',
  ),
  'notes of transformers': ('_commit_hash', '_from_model_config', 'transformers_version'),
  "of the publisher's own code": (
    'assistant_token_id', 'chat_format', 'max_window_size', 'trust_remote_code', 'user_token_id',
  ),
}  # fmt: skip
# What changes a text and is not supported, with the values that change nothing; nothing is null.
_UNREAD: Mapping[str, Sequence[Json]] = {
  'bad_words_ids': ([],), 'begin_suppress_tokens': ([],), 'constraints': ([],),
  'diversity_penalty': (0,), 'dola_layers': (), 'encoder_repetition_penalty': (1,),
  'epsilon_cutoff': (0,), 'eta_cutoff': (0,), 'exponential_decay_length_penalty': (),
  'force_words_ids': ([],), 'forced_bos_token_id': (), 'forced_decoder_ids': ([],),
  'forced_eos_token_id': (), 'guidance_scale': (1,), 'min_length': (0,), 'min_new_tokens': (0,),
  'no_repeat_ngram_size': (0,), 'num_beam_groups': (1,), 'num_beams': (1,),
  'num_return_sequences': (1,), 'penalty_alpha': (0,), 'sequence_bias': ({}, []),
  'stop_strings': ([], ''), 'suppress_tokens': ([],), 'token_healing': (False,), 'top_h': (),
  'typical_p': (1,), 'watermarking_config': (),
}  # fmt: skip


def read_generation(
  config: JsonObject, experiment: LanguageModel, where: pathlib.Path
) -> LanguageModel:
  """Returns the experiment with the settings of generation_config.json.

  A warning names keys that change a text and are not supported, and those that are not known.
  Raises UserError if the penalty is not a number above 0.

  Args:
    config: The contents of the file.
    where: The path of the file, for messages.
  """
  fields = Fields(config)
  penalty = fields.get(_PENALTY)
  for key in (*_ELSEWHERE, *_DRAWN, *(key for keys in _HARMLESS.values() for key in keys)):
    fields.get(key)
  changing = {k: v for k in _UNREAD if (v := fields.get(k)) is not None and v not in _UNREAD[k]}
  if changing:
    log.warning(
      '%s: %s changes the text that transformers generates, and is not supported',
      where,
      ', '.join(changing),
    )
  if unknown := fields.unread():
    log.warning('%s: %s is unknown and ignored', where, ', '.join(unknown))
  kept = {key: value for key, value in config.items() if not key.startswith('_')}
  experiment = experiment.replaced(GENERATION_CONFIG=kept)
  if penalty is None:
    return experiment
  if (
    isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < math.inf
  ):
    raise UserError(f'{where}: {_PENALTY}={penalty!r} must be a number above 0')
  return experiment.replaced(REPETITION_PENALTY=float(penalty))


def written_generation(experiment: LanguageModel, config: JsonObject) -> JsonObject:
  """Returns the contents of generation_config.json.

  They are what the weights came with, with the penalty and the special tokens of today.

  Args:
    config: The contents of config.json, which has the special tokens.
  """
  found = {k: config[k] for k in ('bos_token_id', 'eos_token_id') if config.get(k) is not None}
  published, penalty = experiment.GENERATION_CONFIG, experiment.REPETITION_PENALTY
  if penalty != 1 or _PENALTY in published:
    found[_PENALTY] = penalty
  return published | found
