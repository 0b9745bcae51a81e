"""The known keys of published models that are not read.

A key of a file that is not read, and is not known to be harmless, may change what the model
computes. It is refused, so that tomorrow's keys are not ignored. The tables here and those of what
is read (families, meta) are also those of docs/keys_of_models.md.
"""

from collections.abc import Collection, Mapping, Sequence

from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json

_SHOWN = 200  # characters of a value in a message

# Keys that do not change what a model computes in training or when it continues text.
HARMLESS = frozenset((
  'architectures', 'attention_dropout', 'attn_implementation', 'attn_pdrop', 'auto_map',
  'aux_loss_alpha', 'bos_token_id', 'cache_implementation', 'chunk_size_feed_forward',
  'classifier_dropout', 'dtype', 'embd_pdrop', 'eod_token_id', 'eos_token_id', 'ep_size',
  'experts_implementation', 'experts_per_token', 'finetuning_task', 'hidden_dropout', 'id2label',
  'initial_context_length', 'initializer_range', 'is_decoder', 'is_encoder_decoder',
  'is_llama_config', 'keys_to_ignore_at_inference', 'label2id', 'max_sequence_length',
  'max_window_layers', 'model_type', 'moe_capacity', 'name_or_path',
  'output_attentions', 'output_hidden_states', 'output_router_logits', 'pad_token_id', 'prefix',
  'pretraining_tp', 'problem_type', 'qk_head_dim', 'quantization_config', 'resid_pdrop',
  'residual_dropout', 'return_dict', 'router_aux_loss_coef', 'router_jitter_noise', 'sep_token_id',
  'seq_aux', 'summary_activation', 'summary_first_dropout', 'summary_proj_to_labels',
  'summary_type', 'summary_use_proj', 'task_specific_params', 'tf_legacy_loss', 'tokenizer_class',
  'torch_dtype', 'torchscript', 'transformers.js_config', 'transformers_version', 'unk_token_id',
  'unsloth_fixed', 'unsloth_version', 'use_bfloat16', 'use_cache', 'use_return_dict',
  # dropout of old files
  'attention_probs_dropout_prob', 'hidden_dropout_prob',
  # how an untrained model begins
  'linear_a_log_max', 'linear_a_log_min', 'linear_dt_init_floor', 'linear_dt_max', 'linear_dt_min',
  # initial values of LFM2
  'block_mlp_init_scale', 'block_out_init_scale', 'block_use_xavier_init', 'conv_use_xavier_init',
  # initial values of Granite 4, and how many tokens transformers scans at a time
  'init_method', 'mamba_chunk_size',
  # transformers' own, beside the model
  '_attn_implementation', '_attn_implementation_autoset', '_commit_hash',
  '_experts_implementation', '_from_model_config', '_name_or_path', '_output_attentions',
  '_sliding_window_pattern',
  # how text is generated, which old files say here
  'bad_words_ids', 'begin_suppress_tokens', 'decoder_start_token_id', 'diversity_penalty',
  'do_sample', 'early_stopping', 'encoder_no_repeat_ngram_size',
  'exponential_decay_length_penalty', 'forced_bos_token_id', 'forced_eos_token_id',
  'length_penalty', 'max_length', 'min_length', 'no_repeat_ngram_size', 'num_beam_groups',
  'num_beams', 'num_return_sequences', 'output_scores', 'remove_invalid_values',
  'repetition_penalty', 'return_dict_in_generate', 'suppress_tokens', 'temperature', 'top_k',
  'top_p', 'typical_p',
))  # fmt: skip

# Keys of transformers that change a model, with the values that change nothing.
NEUTRAL: Mapping[str, Sequence[Json]] = {
  'add_cross_attention': (False,), 'cross_attention_hidden_size': (None,), 'num_mtp_layers': (0,),
  'num_nextn_predict_layers': (0,), 'pruned_heads': ({},), 'tie_encoder_decoder': (False,),
}  # fmt: skip

# Counts that loops run over; no published model comes near these numbers.
COUNTS: Mapping[str, int] = {
  'num_hidden_layers': 2000, 'n_layer': 2000, 'num_layers': 2000,
  'num_nextn_predict_layers': 100, 'num_mtp_layers': 100, 'mtp_num_hidden_layers': 100,
  'num_experts': 10_000, 'num_local_experts': 10_000, 'n_routed_experts': 10_000,
  'n_shared_experts': 10_000, 'moe_num_experts': 10_000, 'moe_num_shared_experts': 10_000,
}  # fmt: skip

# The keys of quantization_config by quant_method, with the values that are implemented; ... stands
# for any value.
QUANTIZATION: Mapping[str, Mapping[str, Sequence[Json]]] = {
  'mxfp4': {'modules_to_not_convert': (...,), 'dequantize': (...,)},
  'fp8': {
    'activation_scheme': (...,), 'fmt': ('e4m3', 'float8_e4m3fn', None),
    'modules_to_not_convert': (...,), 'scale_fmt': ('ue8m0', 'float', None),
    'weight_block_size': (...,), 'dequantize': (...,),
  },
  # packed_int4 reads config_groups
  'compressed-tensors': {
    'config_groups': (...,), 'format': ('pack-quantized',), 'global_compression_ratio': (...,),
    'ignore': (...,), 'kv_cache_scheme': (None,), 'quantization_status': (...,),
    'sparsity_config': ({}, None), 'transform_config': ({}, None), 'version': (...,),
  },
}  # fmt: skip


def check_known(
  found: Mapping[str, object], harmless: Collection[str], neutral: Mapping[str, Sequence[object]]
) -> None:
  """Raises UserError for keys of a file that may change what a model computes.

  Args:
    found: The keys that are not read, with their values; null says nothing.
    harmless: Keys that change nothing.
    neutral: Keys that change nothing where they have one of these values.
  """
  for name, value in found.items():
    is_note = name.startswith('_') and isinstance(value, str)
    if value is None or name in harmless or is_note:
      continue
    if name not in neutral:
      raise UserError(
        f'{name}={shortened(value)} is not supported: it may change what the model computes, and '
        'paxlite does not know this key'
      )
    if value not in neutral[name]:
      raise UserError(f'{name}={shortened(value)} is not supported')


def shortened(value: object) -> str:
  """Returns a value of a file as a message shows it."""
  text = repr(value)
  return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}…'


def check_count(name: str, value: object, most: int) -> int:
  """Returns a loop count; raises UserError if no model could have that many."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise UserError(f'{name}={shortened(value)} must be an integer')
  if not 0 <= value <= most:
    raise UserError(f'{name}={value} must be from 0 to {most:,}')
  return value


def check_counts(config: Mapping[str, Json]) -> None:
  """Raises UserError if a loop count is not a number, or larger than any model's."""
  for name, most in COUNTS.items():
    if config.get(name) is not None:
      check_count(name, config[name], most)


def check_quantization(found: Json) -> None:
  """Raises UserError unless quantization_config says what the import can dequantize."""
  if found is None:
    return
  fields = Fields(found if isinstance(found, dict) else {})
  method = fields.get('quant_method')
  if method not in list(QUANTIZATION):
    raise UserError(f'quantization_config={shortened(found)} is not supported')
  neutral = {name: values for name, values in QUANTIZATION[method].items() if ... not in values}
  with located('quantization_config'):
    check_known(fields.left(), QUANTIZATION[method].keys() - neutral, neutral)
