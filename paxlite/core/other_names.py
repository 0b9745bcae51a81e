"""Attributes and flags of Pax, MaxText and Hugging Face's Trainer, and their names in paxlite.

They are used in messages only. paxlite does not accept the name of another library: the message
says which name paxlite has for it.
"""

_MESH = 'The mesh is ICI_MESH_SHAPE × DCN_MESH_SHAPE over MESH_AXES'
_NEEDLESS = 'paxlite needs no such attribute: leave it out'
_UNSUPPORTED = 'paxlite has nothing like it'

# Maps a name in capitals to an attribute of paxlite, or to a sentence, which has a space in it.
ATTRIBUTES = {
  # Pax
  'BATCH_SIZE': 'PERCORE_BATCH_SIZE',
  'CIRCULAR_REPEAT': _UNSUPPORTED,
  'COMBINE_QKV': _NEEDLESS,
  'EMA_DECAY': _UNSUPPORTED,
  'EMBEDDING_LOOKUP_STYLE': _NEEDLESS,
  'ENABLE_FP8': 'USE_FP8',
  'ENABLE_TE': 'USE_TE',
  'EVAL_SKIP_TRAIN': _NEEDLESS,
  'LAYERS': 'NUM_LAYERS',
  'LOAD_BALANCING_WEIGHT': 'AUX_LOSS_COEF',
  'LR': 'LEARNING_RATE',
  'MICROBATCH_SIZE': 'NUM_MICROBATCHES',
  'MODEL_CLASS': 'task() says which model is trained: see docs/experiments.md',
  'NUM_GPUS': _MESH,
  'NUM_STAGES': "A pipeline is the mesh's axis stage: see docs/scaling.md",
  'PIPELINE_BROADCAST_INPUTS': _NEEDLESS,
  'SPM_MODEL': 'VOCAB_PATH',
  'TRAINABLE_PE_MAX_SEQ_LEN': 'MAX_SEQ_LEN',
  'TRAINING_OPTIMIZED_SHARDING': _NEEDLESS,
  'TRAINING_SEED': 'SEED',
  'USE_CUDNN_FLASH_ATTENTION': 'USE_FLASH_ATTENTION',
  'USE_MQA': 'NUM_KV_HEADS=1 is multi-query attention',
  'Z_LOSS_WEIGHT': _UNSUPPORTED,
  # MaxText
  'ADAM_B1': 'ADAM_BETA1',
  'ADAM_B2': 'ADAM_BETA2',
  'ADAM_EPS': 'ADAM_EPSILON',
  'ADAM_WEIGHT_DECAY': 'WEIGHT_DECAY',
  'BASE_EMB_DIM': 'MODEL_DIMS',
  'BASE_MLP_DIM': 'HIDDEN_DIMS',
  'BASE_NUM_DECODER_LAYERS': 'NUM_LAYERS',
  'BASE_NUM_KV_HEADS': 'NUM_KV_HEADS',
  'BASE_NUM_QUERY_HEADS': 'NUM_HEADS',
  'BASE_OUTPUT_DIRECTORY': '--job_log_dir=FOLDER is where a run writes',
  'CAPACITY_FACTOR': 'EXPERT_CAPACITY_FACTOR',
  'CHECKPOINT_PERIOD': 'CHECKPOINT_EVERY_N_STEPS',
  'DTYPE': 'FPROP_DTYPE',
  'EVAL_INTERVAL': 'EVAL_INTERVAL_STEPS',
  'GRADIENT_ACCUMULATION_STEPS': 'NUM_MICROBATCHES',
  'GRADIENT_CLIPPING_THRESHOLD': 'CLIP_GRADIENT_NORM_TO_VALUE',
  'HEAD_DIM': 'DIMS_PER_HEAD',
  'LOAD_FULL_STATE_PATH': 'CHECKPOINT_RESTORE_PATH, with CHECKPOINT_RESTORE_STATE=True',
  'LOAD_PARAMETERS_PATH': 'CHECKPOINT_RESTORE_PATH',
  'LOG_PERIOD': 'SUMMARY_INTERVAL_STEPS',
  'LOGITS_VIA_EMBEDDING': 'SEPARATE_EMBEDDING is its opposite',
  'MAX_TARGET_LENGTH': 'MAX_SEQ_LEN',
  'MODEL_NAME': '--fdl_config=EXPERIMENT names the model',
  'NUM_EXPERTS_PER_TOK': 'NUM_EXPERTS_PER_TOKEN',
  'PER_DEVICE_BATCH_SIZE': 'PERCORE_BATCH_SIZE',
  'QUANTIZATION': 'USE_FP8, USE_INT8 or USE_TE: see docs/backends.md',
  'REMAT_POLICY': 'CHECKPOINT_POLICY',
  'ROPE_MAX_TIMESCALE': 'ROPE_THETA',
  'RUN_NAME': '--job_log_dir=FOLDER is where a run writes',
  'SCAN_LAYERS': 'USE_REPEATED_LAYER',
  'SLIDING_WINDOW_SIZE': 'SLIDING_WINDOW',
  'STEPS': 'MAX_STEPS',
  'TOKENIZER_PATH': 'VOCAB_PATH',
  'WARMUP_STEPS_FRACTION': 'LR_COS_WARMUP, in steps',
  # Hugging Face's Trainer
  'EVAL_STEPS': 'EVAL_INTERVAL_STEPS',
  'LOGGING_STEPS': 'SUMMARY_INTERVAL_STEPS',
  'LR_SCHEDULER_TYPE': 'LR_SCHEDULE',
  'MAX_GRAD_NORM': 'CLIP_GRADIENT_NORM_TO_VALUE',
  'NUM_TRAIN_EPOCHS': 'NUM_EPOCHS',
  'OUTPUT_DIR': '--job_log_dir=FOLDER is where a run writes',
  'PER_DEVICE_EVAL_BATCH_SIZE': 'EVAL_BATCH_SIZE, of all devices together',
  'PER_DEVICE_TRAIN_BATCH_SIZE': 'PERCORE_BATCH_SIZE',
  'SAVE_STEPS': 'CHECKPOINT_EVERY_N_STEPS',
  'SAVE_TOTAL_LIMIT': 'CHECKPOINT_MAX_TO_KEEP',
  'WARMUP_STEPS': 'LR_COS_WARMUP',
}

# Maps a flag of Pax's main to a sentence.
FLAGS = {
  'enable_auto_sharding': 'Shardings follow rules here: leave it out',
  'eval_on_test': '--mode=eval evaluates, and --fdl.EVAL_SPLIT=test names the split',
  'exit_after_ondemand_checkpoint': 'A job that is preempted always leaves: leave it out',
  'exp': 'It is --fdl_config=EXPERIMENT here',
  'globally_use_hardware_rng': 'Leave it out: JAX decides',
  'jax_fully_async_checkpoint': 'Checkpoints are always written in the background: leave it out',
  'jax_traceback_filtering_option': 'JAX_TRACEBACK_FILTERING in the environment is the same',
  'jax_xla_backend': 'JAX_PLATFORMS in the environment is the same',
  'maybe_use_persistence_checkpointing': 'Leave it out: there is one way to save',
  'restore_checkpoint_dir': 'It is --fdl.CHECKPOINT_RESTORE_PATH=FOLDER here',
  'restore_checkpoint_step': '--fdl.CHECKPOINT_RESTORE_PATH may name one checkpoint_%08d',
  'tensorstore_use_ocdbt': 'Checkpoints are plain zarr folders: leave it out',
}


def flag_hint(name: str) -> str:
  """A sentence with the name that replaces a flag of another library; '' for other names."""
  return f'{FLAGS[name]}.' if name in FLAGS else attribute_hint(name).rstrip()


def attribute_hint(name: str) -> str:
  """A sentence with the name that replaces an attribute of another library; '' for others."""
  upper = name.upper()
  if upper.startswith(('ICI_', 'DCN_')) and upper.endswith('_PARALLELISM'):
    return f'{_MESH}. '
  found = ATTRIBUTES.get(upper, '')
  if found and ' ' not in found:
    return f'It is {found} here. '
  return found and f'{found}. '
