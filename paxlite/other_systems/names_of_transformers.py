"""Names of TrainingArguments in transformers and of its example scripts, and what they are here.

Those of TRL, PEFT and Axolotl are in names_of_trl.py.
"""

from paxlite.other_systems.answers import Answer, absent, each, instead, needless, renamed

_FOLDER = instead('--job_log_dir=FOLDER is where a run writes')
_HUB = instead('paxlite export --push=org/name uploads what it writes')
_TORCH = needless('it is for PyTorch; XLA compiles the step')
_DDP = needless('the mesh divides the work: docs/scaling.md')
_LOADER = needless('a thread reads two batches ahead')
_MODE = instead('--mode=train, eval or decode')
_LOG = needless('process 0 prints a line at each report')
_METRICS = absent(
  'evaluation reports the loss, perplexity and accuracy; EVAL_TASKS are zero-shot tasks'
)
_COSINE = 'LR_COS_WARMUP of the cosine schedule, the default of supervised fine-tuning'

ARGUMENTS: dict[str, Answer] = {
  **each('output_dir logging_dir run_name', _FOLDER),
  **each('do_train do_eval do_predict', _MODE),
  'resume_from_checkpoint': needless('a run continues from the last checkpoint in its folder'),
  'overwrite_output_dir': instead('Name a new --job_log_dir: a run with checkpoints continues'),
  # Batch and length
  'per_device_train_batch_size': renamed('PERCORE_BATCH_SIZE', 'with all microbatches'),
  'per_gpu_train_batch_size': renamed('PERCORE_BATCH_SIZE', 'with all microbatches'),
  'per_device_eval_batch_size': renamed('EVAL_BATCH_SIZE', 'sequences on all devices together'),
  'gradient_accumulation_steps': renamed(
    'NUM_MICROBATCHES', 'PERCORE_BATCH_SIZE counts the sequences of all of them'
  ),
  'auto_find_batch_size': instead('paxlite plan EXPERIMENT --target=here finds the largest batch'),
  'max_steps': renamed('MAX_STEPS'),
  **each('num_train_epochs num_epochs epochs', renamed('NUM_EPOCHS')),
  **each('max_seq_length max_length', renamed('MAX_SEQ_LEN')),
  'packing': renamed('PACKED_INPUT'),
  'batch_size': renamed('PERCORE_BATCH_SIZE', 'sequences per device'),
  # Optimizer and schedule
  **each('learning_rate lr', renamed('LEARNING_RATE')),
  'lr_scheduler_type': renamed(
    'LR_SCHEDULE',
    'linear, inverse_sqrt, constant and warmup_stable_decay have the same names; cosine is '
    'linear_rampup_cosine_decay, which ends at LR_COS_MIN_RATIO and has LR_COS_WARMUP',
  ),
  'lr_scheduler_kwargs': instead('LR_DECAY_, LR_COS_ and LR_LRED_ attributes set the schedule'),
  'warmup_steps': renamed('LR_WARMUP', _COSINE),
  'warmup_ratio': renamed('LR_WARMUP', f'in steps; {_COSINE}'),
  'weight_decay': renamed(
    'WEIGHT_DECAY', 'of every variable, norms and biases too, unless WEIGHT_DECAY_FACTORS differ'
  ),
  'adam_beta1': renamed('ADAM_BETA1'),
  'adam_beta2': renamed('ADAM_BETA2'),
  'adam_epsilon': renamed('ADAM_EPSILON'),
  'max_grad_norm': renamed('CLIP_GRADIENT_NORM_TO_VALUE'),
  'optim': renamed(
    'OPTIMIZER',
    'adamw_torch and its variants are adamw; muon, lion, adafactor and schedule_free are supported',
  ),
  'optim_args': instead('OPTIMIZER reads attributes such as ADAM_BETA1'),
  'optim_target_modules': absent('OPTIMIZER trains all of TRAINABLE_VARIABLES'),
  'adafactor': renamed('OPTIMIZER', 'adafactor'),
  'label_smoothing_factor': renamed('LABEL_SMOOTHING'),
  'neftune_noise_alpha': absent('EMBEDDING_DROPOUT_PROB sets dropout of embeddings'),
  'average_tokens_across_devices': needless('the loss is the mean over all tokens of a batch'),
  # Precision and memory
  'bf16': renamed('FPROP_DTYPE', 'bfloat16 is the default'),
  'fp16': renamed('FPROP_DTYPE', 'float16; bfloat16 needs no scaling of the loss'),
  **each('bf16_full_eval fp16_full_eval', needless('evaluation computes as training does')),
  'tf32': instead('JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32 in the environment, with float32'),
  **each(
    'gradient_checkpointing activation_checkpointing',
    renamed('CHECKPOINT_POLICY', 'SAVE_NOTHING recomputes all, SAVE_EVERYTHING nothing'),
  ),
  **each(
    'gradient_checkpointing_kwargs activation_checkpointing_kwargs', renamed('CHECKPOINT_POLICY')
  ),
  **each('torch_compile torch_compile_backend torch_compile_mode', _TORCH),
  **each('torch_empty_cache_steps use_cache', _TORCH),
  **each('use_liger_kernel liger_kernel_config', needless('the device decides the kernels')),
  # Evaluation
  'eval_strategy': renamed('EVAL_INTERVAL_STEPS', 'it is always by steps'),
  'evaluation_strategy': renamed('EVAL_INTERVAL_STEPS', 'it is always by steps'),
  'eval_steps': renamed('EVAL_INTERVAL_STEPS'),
  'eval_delay': absent('evaluation is every EVAL_INTERVAL_STEPS'),
  'eval_on_start': absent('paxlite eval RUN evaluates a checkpoint'),
  **each('prediction_loss_only include_for_metrics batch_eval_metrics label_names', _METRICS),
  **each('eval_do_concat_batches eval_use_gather_object eval_accumulation_steps', _METRICS),
  # Checkpoints
  'save_strategy': renamed('CHECKPOINT_EVERY_N_STEPS', 'it is always by steps'),
  'save_steps': renamed('CHECKPOINT_EVERY_N_STEPS'),
  'save_total_limit': renamed('CHECKPOINT_MAX_TO_KEEP'),
  'save_only_model': absent(
    'a checkpoint has the whole state; paxlite export writes weights alone'
  ),
  'save_safetensors': instead('paxlite export writes safetensors'),
  'save_on_each_node': needless('all processes write to one folder'),
  'enable_jit_checkpoint': needless('a run that gets SIGTERM saves first'),
  'load_best_model_at_end': renamed('KEEP_BEST', 'the checkpoint is in best/ of the run folder'),
  'metric_for_best_model': renamed('BEST_METRIC', 'such as avg_xent, for KEEP_BEST'),
  'greater_is_better': needless('paxlite knows which values of BEST_METRIC are better'),
  **each(
    'early_stopping_patience early_stopping',
    renamed('EARLY_STOPPING_PATIENCE', 'evaluations without a new best'),
  ),
  'early_stopping_threshold': absent('any better value counts for EARLY_STOPPING_PATIENCE'),
  **each(
    'ignore_data_skip restore_callback_states_from_checkpoint',
    needless('a run continues with its whole state and its position in the data'),
  ),
  # Reports
  'logging_strategy': renamed('SUMMARY_INTERVAL_STEPS', 'it is always by steps'),
  'logging_steps': renamed('SUMMARY_INTERVAL_STEPS'),
  **each('logging_first_step logging_nan_inf_filter log_on_each_node', _LOG),
  **each('log_level log_level_replica disable_tqdm include_num_input_tokens_seen', _LOG),
  'report_to': renamed(
    'TRACKERS', 'wandb, mlflow or trackio; files and TensorBoard are always written'
  ),
  'project': instead(
    'WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT in the environment, for TRACKERS'
  ),
  **each(
    'trackio_space_id trackio_bucket_id trackio_static_space_id',
    absent('TRACKERS=[trackio] writes to a database on this machine'),
  ),
  'debug': absent('MAX_SKIPPED_STEPS=1 ends a run at the first NaN and names its operation'),
  'skip_memory_metrics': needless('--dry_run and paxlite compile print the memory of a device'),
  # Data
  'seed': renamed('SEED'),
  'data_seed': renamed('SEED', 'it also decides the order of the data'),
  'full_determinism': needless('SEED decides every random number'),
  'dataset_text_field': renamed('TEXT_FIELD'),
  **each('dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers', _LOADER),
  **each('dataloader_prefetch_factor dataloader_multiprocessing_context', _LOADER),
  'dataloader_in_order': _LOADER,
  'dataloader_drop_last': needless('sequences continue into the next epoch'),
  'remove_unused_columns': needless('only the text of a record is read'),
  **each(
    'group_by_length train_sampling_strategy length_column_name',
    absent('examples are packed to MAX_SEQ_LEN, in a random order'),
  ),
  # Devices
  'use_cpu': instead('JAX_PLATFORMS=cpu in the environment is the same'),
  'no_cuda': instead('JAX_PLATFORMS=cpu in the environment is the same'),
  **each('fsdp fsdp_config', instead('The mesh axis data is FSDP: docs/scaling.md')),
  'deepspeed': instead('The mesh axis data is ZeRO-3: docs/scaling.md'),
  'parallelism_config': instead('ICI_MESH_SHAPE and DCN_MESH_SHAPE: docs/scaling.md'),
  **each('ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers', _DDP),
  **each('ddp_static_graph ddp_backend accelerator_config', _DDP),
  'ddp_timeout': renamed('STEP_TIMEOUT', 'in seconds'),
  'local_rank': instead('--host_idx, or nothing in a Slurm step'),
  # The hub
  **each('push_to_hub hub_token hub_private_repo hub_model_id hub_strategy', _HUB),
  **each('hub_always_push hub_revision', _HUB),
  # Models and files, as in example scripts
  **each(
    'model_name_or_path model_name',
    renamed('CHECKPOINT_RESTORE_PATH', 'a folder that paxlite import --from=hf makes'),
  ),
  'tokenizer_name': renamed('VOCAB_PATH', 'imported weights have theirs'),
  'torch_dtype': renamed('FPROP_DTYPE'),
  'attn_implementation': renamed('USE_FLASH_ATTENTION'),
  'load_in_8bit': renamed('FROZEN_DTYPE', 'int8, with USE_LORA'),
  'load_in_4bit': renamed('FROZEN_DTYPE', 'nf4 or int4, for weights that LoRA freezes'),
  **each(
    'train_file train_files training_file', renamed('TRAIN_FILES', 'of fine-tuning experiments')
  ),
  **each('validation_file eval_file', renamed('EVAL_FILES', 'of fine-tuning experiments')),
}
