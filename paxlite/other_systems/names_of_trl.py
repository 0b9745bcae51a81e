"""Names of TRL's configs, PEFT's LoraConfig and Axolotl's YAML files, and what they are here.

Unsloth takes the arguments of the first two. What SFTConfig inherits from TrainingArguments is in
names_of_transformers.py.
"""

from paxlite.other_systems.answers import Answer, absent, each, instead, needless, renamed

_ROWS = needless('sequences are packed without padding, and attention stays within an example')
_FORMATS = needless('the keys of a record determine its format: docs/fine_tuning.md')
_LEARNED = needless('only answers are learned: what the assistant says, or the completion')
_ONLY_ANSWERS = absent('only answers are learned; HuggingFaceDocuments learns whole documents')
_INITIAL = needless('A starts like its weight, and B at 0')
_RESTORED = renamed('CHECKPOINT_RESTORE_PATH', 'a folder that paxlite import --from=hf makes')

# SFTConfig, and the arguments of TRL's scripts
SFT: dict[str, Answer] = {
  'dataset_name': renamed('TRAIN_FILES', 'hf:org/name, or files of your own'),
  **each('dataset_config dataset_kwargs', _FORMATS),
  'dataset_text_field': renamed(
    'TEXT_FIELD', 'of documents; the keys of a chat determine its format'
  ),
  'dataset_num_proc': needless('examples are tokenized when a run starts'),
  'dataset_train_split': renamed('TRAIN_FILES', 'files, and no splits'),
  'dataset_test_split': renamed('EVAL_FILES', 'or EVAL_FRACTION, which holds examples out'),
  **each('packing_strategy padding_free pad_to_multiple_of pad_token eval_packing', _ROWS),
  **each('completion_only_loss assistant_only_loss train_on_responses_only', _LEARNED),
  'eos_token': needless("EOS_IDS are the tokenizer's unless you set them"),
  'chat_template_path': renamed('CHAT_TEMPLATE', 'a file, or the text of a template'),
  'shuffle_dataset': needless('examples are in a random order, which SEED decides'),
  'loss_type': renamed(
    'PREFERENCE_LOSS', 'of preferences; otherwise the loss is the cross-entropy'
  ),
  'activation_offloading': renamed('OFFLOAD_ACTIVATIONS', 'the names of activations'),
  **each('model_revision trust_remote_code', needless('weights are imported, without their code')),
  'model_init_kwargs': needless('the weights determine the model'),
  **each(
    'use_bnb_nested_quant bnb_4bit_quant_type',
    renamed('FROZEN_DTYPE', 'nf4, with nested quantization, or int4'),
  ),
}

# DPOConfig, ORPOConfig and CPOConfig
PREFERENCES: dict[str, Answer] = {
  'beta': renamed('PREFERENCE_BETA'),
  'simpo_gamma': renamed('SIMPO_GAMMA'),
  'ref_model_name_or_path': renamed('REFERENCE_RESTORE_PATH'),
  'precompute_ref_log_probs': renamed('PRECOMPUTE_REFERENCE'),
  'precompute_ref_batch_size': needless('it is the batch of a step, or of a microbatch'),
  'sync_ref_model': absent('the reference does not change'),
  'desirable_weight': renamed('DESIRABLE_WEIGHT'),
  'undesirable_weight': renamed('UNDESIRABLE_WEIGHT'),
  'center_rewards_coefficient': renamed('CENTER_REWARDS'),
  'cpo_alpha': absent('PREFERENCE_LOSS=simpo has no other term'),
  'max_prompt_length': needless('a pair that is too long is refused or left out: TOO_LONG'),
  'max_completion_length': needless('a pair that is too long is refused or left out: TOO_LONG'),
  'disable_dropout': needless('there is no dropout unless you set DROPOUT_PROB'),
}

# LoraConfig, with and without the prefix of TRL's scripts
LORA: dict[str, Answer] = {
  'use_peft': renamed('USE_LORA'),
  **each('r lora_r', renamed('LORA_RANK')),
  'lora_alpha': renamed('LORA_ALPHA'),
  'lora_dropout': renamed('LORA_DROPOUT'),
  **each(
    'target_modules lora_target_modules target_parameters',
    renamed('LORA_TARGETS', 'the same names, and all-linear; LORA_TARGET_LAYERS: attention or mlp'),
  ),
  **each('task_type lora_task_type', needless('every model predicts the next token')),
  'bias': needless('biases are frozen under LoRA; TRAINABLE_VARIABLES can add them'),
  **each('modules_to_save lora_modules_to_save', renamed('LORA_MODULES_TO_SAVE')),
  'trainable_token_indices': renamed('LORA_TOKENS', 'ids, of the embedding and of the head'),
  'use_dora': renamed('USE_DORA'),
  'use_rslora': renamed('LORA_RS'),
  'layers_to_transform': renamed('LORA_LAYERS'),
  'rank_pattern': renamed('LORA_RANK_PATTERN', "a list: ['q_proj=16']"),
  'alpha_pattern': renamed('LORA_ALPHA_PATTERN', 'a list, too'),
  'init_lora_weights': _INITIAL,
}

# Keys of Axolotl's YAML files that the tables above do not have
AXOLOTL: dict[str, Answer] = {
  'base_model': _RESTORED,
  'adapter': renamed('USE_LORA', 'True is lora'),
  'datasets': renamed('TRAIN_FILES', 'the keys of a record determine the format'),
  'test_datasets': renamed('EVAL_FILES'),
  'val_set_size': renamed('EVAL_FRACTION', 'a share of the examples'),
  'sequence_len': renamed('MAX_SEQ_LEN'),
  'sample_packing': renamed('PACKED_INPUT'),
  'micro_batch_size': renamed('PERCORE_BATCH_SIZE', 'with all microbatches'),
  'train_on_inputs': _ONLY_ANSWERS,
  'lora_target_linear': renamed('LORA_TARGET_LAYERS', 'all'),
  'evals_per_epoch': renamed('EVAL_INTERVAL_STEPS', 'in steps'),
  'saves_per_epoch': renamed('CHECKPOINT_EVERY_N_STEPS', 'in steps'),
  'flash_attention': renamed('USE_FLASH_ATTENTION'),
  **each(
    'wandb_project wandb_name wandb_entity',
    instead('TRACKERS=[wandb], with WANDB_PROJECT and its other environment variables'),
  ),
}
