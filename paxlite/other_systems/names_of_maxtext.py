"""Keys of MaxText's base.yml, and what they are in paxlite."""

from paxlite.other_systems.answers import Answer, absent, each, instead, needless, renamed

_FOLDER = instead('--job_log_dir=FOLDER is the run folder')
_SHUFFLED = 'SEED determines the order of sequences and the initial values'
_CACHE = absent('the layout of the cache of keys and values is fixed')
_CLOUD = absent('a run writes to its --job_log_dir, which may be gs://, and to TRACKERS')


def _axis(ours: str) -> dict[str, Answer]:
  """Returns the sizes of one of MaxText's axes, within a slice and across slices."""
  theirs, axis = ours.split(' ')
  return {
    f'{where}_{theirs}_parallelism': instead(
      f'It is the size of the mesh axis {axis} in {where.upper()}_MESH_SHAPE'
    )
    for where in ('ici', 'dcn')
  }


KEYS: dict[str, Answer] = {
  # A run and its checkpoints
  **each('run_name base_output_directory', _FOLDER),
  'model_name': instead('--fdl_config=EXPERIMENT names the model'),
  'decoder_block': instead('--fdl_config=EXPERIMENT names the model'),
  'global_parameter_scale': instead('--fdl_config=MaxText16B to MaxText1024B are these sizes'),
  'hardware': needless('JAX finds the devices'),
  'enable_checkpointing': instead('--enable_checkpoint_saving=False turns it off'),
  'async_checkpointing': needless('checkpoints are always written while training continues'),
  'checkpoint_period': renamed('CHECKPOINT_EVERY_N_STEPS'),
  'max_num_checkpoints_to_keep': renamed('CHECKPOINT_MAX_TO_KEEP'),
  'load_parameters_path': renamed('CHECKPOINT_RESTORE_PATH'),
  'load_full_state_path': renamed('CHECKPOINT_RESTORE_PATH', 'with CHECKPOINT_RESTORE_STATE=True'),
  'enable_single_replica_ckpt_restoring': needless('there is one way to restore'),
  'force_unroll': needless('weights fit repeated and unrolled layers; UNROLL_LAYERS unrolls them'),
  'enable_emergency_checkpoint': renamed(
    'LOCAL_CHECKPOINT_EVERY_N_STEPS', 'each host keeps a state in LOCAL_CHECKPOINT_DIR'
  ),
  'save_config_to_gcs': needless('the experiment and its config are always written'),
  'metrics_file': needless('metrics.jsonl is always written'),
  **each('gcs_metrics enable_checkpoint_cloud_logger enable_checkpoint_standard_logger', _CLOUD),
  **each('use_vertex_tensorboard vertex_tensorboard_project vertex_tensorboard_region', _CLOUD),
  'enable_tensorboard': needless('summaries for TensorBoard are always written'),
  'enable_goodput_recording': needless('goodput is always recorded'),
  'log_period': renamed('SUMMARY_INTERVAL_STEPS'),
  'record_internal_nn_metrics': absent('each layer sows the same summaries in every run'),
  # The model
  'base_emb_dim': renamed('MODEL_DIMS'),
  'base_num_query_heads': renamed('NUM_HEADS'),
  'base_num_kv_heads': renamed('NUM_KV_HEADS'),
  'base_mlp_dim': renamed('HIDDEN_DIMS'),
  'base_num_decoder_layers': renamed('NUM_LAYERS'),
  'head_dim': renamed(
    'DIMS_PER_HEAD', 'with HEADS_SPAN_MODEL=False if NUM_HEADS × DIMS_PER_HEAD is not MODEL_DIMS'
  ),
  'vocab_size': renamed('VOCAB_SIZE'),
  'max_target_length': renamed('MAX_SEQ_LEN'),
  'mlp_activations': renamed(
    'ACTIVATION_CLS', 'for a pair with linear, set USE_GATED_ACTIVATION=True'
  ),
  'normalization_layer_epsilon': renamed('LAYERNORM_EPSILON'),
  'rope_max_timescale': renamed('ROPE_THETA'),
  'rope_min_timescale': needless('it is always 1'),
  'sliding_window_size': renamed('SLIDING_WINDOW'),
  'attn_logits_soft_cap': renamed('ATTEN_LOGIT_CAP'),
  'final_logits_soft_cap': renamed('SOFTMAX_CAP_LOGITS'),
  'logits_via_embedding': renamed('SEPARATE_EMBEDDING', 'with the opposite value'),
  'normalize_embedding_logits': absent('attend_scale of TokenEmbedding scales them, in task()'),
  'logits_dot_in_fp32': absent('the product is in FPROP_DTYPE and the loss in float32'),
  'use_iota_embed': needless('rows of the table are gathered'),
  'use_untrainable_positional_embedding': renamed(
    'TRAINABLE_POSITION_EMB', 'with the opposite value'
  ),
  'trainable_position_size': renamed(
    'TRAINABLE_POSITION_EMB', 'its length is MAX_POSITION_EMBEDDINGS'
  ),
  'num_experts': renamed('NUM_EXPERTS', 'experiments with experts have it'),
  'num_experts_per_tok': renamed('NUM_EXPERTS_PER_TOKEN'),
  'capacity_factor': renamed('EXPERT_CAPACITY_FACTOR'),
  'load_balance_loss_weight': renamed('AUX_LOSS_COEF'),
  **each('megablox sparse_matmul', renamed('USE_DROPLESS_MOE')),
  'dropout_rate': renamed('DROPOUT_PROB'),
  'enable_dropout': renamed('DROPOUT_PROB', '0 turns it off'),
  'dtype': renamed('FPROP_DTYPE'),
  'weight_dtype': needless('trained parameters are float32; FROZEN_DTYPE is for the others'),
  'mu_dtype': renamed('ADAM_MOMENTS_DTYPE', 'it is the dtype of both moments'),
  'grad_dtype': renamed('GRADIENT_DTYPE'),
  'optimizer_memory_host_offload': renamed('OFFLOAD_OPTIMIZER'),
  'quantization': instead('USE_FP8, USE_INT8 or USE_TE choose a backend: docs/backends.md'),
  'quantize_kvcache': absent('INT8_WEIGHTS quantizes only weights'),
  'quantization_local_shard_count': absent('USE_INT8 has no such number'),
  # How it is computed
  'remat_policy': renamed(
    'CHECKPOINT_POLICY', 'full is SAVE_NOTHING, minimal is SAVE_DOT_WITH_NO_BATCH_DIM'
  ),
  'scan_layers': renamed('USE_REPEATED_LAYER'),
  'param_scan_axis': needless('it is always the first dimension'),
  'attention': renamed('USE_FLASH_ATTENTION', 'the device and the shape choose the kernel'),
  'fused_qkv': needless('queries, keys and values share a matrix if their sizes allow it'),
  'fused_mlp': absent('the gate and the hidden units have a matrix each'),
  'gradient_accumulation_steps': renamed(
    'NUM_MICROBATCHES', 'PERCORE_BATCH_SIZE counts the sequences of all microbatches'
  ),
  # The mesh
  **_axis('data replica'),
  **_axis('fsdp data'),
  **_axis('tensor mdl'),
  **_axis('expert expert'),
  **_axis('context context'),
  **_axis('sequence context'),
  **_axis('pipeline stage'),
  **each(
    'ici_fsdp_transpose_parallelism dcn_fsdp_transpose_parallelism'
    ' ici_autoregressive_parallelism dcn_autoregressive_parallelism',
    absent('the axes have their sizes in ICI_MESH_SHAPE and DCN_MESH_SHAPE: docs/scaling.md'),
  ),
  'mesh_axes': renamed('MESH_AXES'),
  'logical_axis_rules': instead('parallel/partitioning.py has the rules, and rules() changes them'),
  'data_sharding': needless('the batch is sharded over replica, data and expert'),
  'num_slices': needless('JAX knows the slices'),
  'num_pipeline_microbatches': renamed('NUM_MICROBATCHES'),
  'num_pipeline_repeats': renamed('NUM_PIPELINE_REPEATS'),
  'pipeline_fsdp_ag_once': renamed('GATHER_STAGES_ONCE'),
  'enable_single_controller': absent('every host runs a process'),
  # The data
  'per_device_batch_size': renamed('PERCORE_BATCH_SIZE'),
  'eval_per_device_batch_size': renamed('EVAL_BATCH_SIZE', 'sequences on all devices together'),
  'dataset_type': instead('Inherit from a class of experiments/datasets.py: docs/data.md'),
  'dataset_path': renamed('DATASET_PATH', 'of flat tokens; --tfds_data_dir is for TFDS'),
  'dataset_name': renamed('TRAIN_SOURCES', 'tfds:NAME:VERSION/SPLIT'),
  'eval_dataset_name': renamed('EVAL_SOURCES', 'tfds:NAME:VERSION/SPLIT'),
  'train_split': renamed('TRAIN_SPLIT'),
  'eval_split': renamed('EVAL_SPLIT'),
  **each('hf_path hf_data_dir', renamed('TRAIN_SOURCES', 'hf:NAME:CONFIGURATION/SPLIT')),
  'hf_data_files': renamed('TRAIN_SOURCES', 'names of files'),
  'hf_access_token': instead('Set HF_TOKEN in the environment'),
  'tokenizer_path': renamed('VOCAB_PATH'),
  'packing': renamed('PACKED_INPUT'),
  'grain_worker_count': needless('a thread reads two batches ahead'),
  'expansion_factor_real_data': absent('every process reads its own sequences'),
  'max_corpus_chars': instead('Use --sample_chars of paxlite train-tokenizer'),
  'reuse_example_batch': instead('Synthetic experiments, such as Synthetic126M, need no data'),
  'enable_data_shuffling': absent(_SHUFFLED),
  **each('data_shuffle_seed init_weights_seed', renamed('SEED')),
  # Optimizer and schedule
  'steps': renamed('MAX_STEPS'),
  'learning_rate': renamed('LEARNING_RATE'),
  'learning_rate_schedule_steps': renamed('LR_COS_DECAY_END'),
  'cosine_learning_rate_final_fraction': renamed('LR_COS_MIN_RATIO'),
  'warmup_steps_fraction': renamed('LR_COS_WARMUP', 'in steps'),
  'gradient_clipping_threshold': renamed('CLIP_GRADIENT_NORM_TO_VALUE'),
  'opt_type': renamed('OPTIMIZER', 'adam_pax is adam'),
  'adam_b1': renamed('ADAM_BETA1'),
  'adam_b2': renamed('ADAM_BETA2'),
  'adam_eps': renamed('ADAM_EPSILON'),
  'adam_eps_root': renamed('ADAM_EPSILON_ROOT'),
  'adam_weight_decay': renamed('WEIGHT_DECAY'),
  # Evaluation
  'eval_interval': renamed('EVAL_INTERVAL_STEPS'),
  'eval_steps': renamed('MAX_EVAL_BATCHES'),
  'target_eval_loss': absent(
    'a run ends at MAX_STEPS, or after EARLY_STOPPING_PATIENCE evaluations without improvement'
  ),
  # Profiles, faults, compilation
  'profiler': renamed('PROFILER_CAPTURE_STEP'),
  'skip_first_n_steps_for_profiler': renamed('PROFILER_CAPTURE_STEP'),
  'profiler_steps': renamed('PROFILER_NUM_STEPS'),
  'upload_all_profiler_results': _CLOUD,
  'collect_stack_trace': renamed('STACK_TRACE_INTERVAL'),
  'stack_trace_interval_seconds': renamed('STACK_TRACE_INTERVAL'),
  'stack_trace_to_cloud': _CLOUD,
  'max_checkify': absent(
    'MAX_SKIPPED_STEPS=1 ends a run at the first NaN, and names its operation'
  ),
  'jax_cache_dir': instead('Set JAX_COMPILATION_CACHE_DIR in the environment'),
  'compiled_trainstep_file': instead(
    '--compiled_step=FILE loads it; paxlite compile --save writes it'
  ),
  'compile_topology': instead('It is --target of paxlite compile'),
  'compile_topology_num_slices': instead('It is part of --target of paxlite compile'),
  # Generating text
  'prompt': instead(
    'paxlite generate CHECKPOINT "a prompt"; SAMPLE_PROMPT and SAMPLE_PROMPTS during training'
  ),
  'max_prefill_predict_length': needless('it is the length of the prompt'),
  'decode_sampling_strategy': instead('TEMPERATURE, TOP_K and TOP_P choose the next token'),
  'decode_sampling_nucleus_p': renamed('TOP_P'),
  'decode_sampling_top_k': renamed('TOP_K'),
  'decode_sampling_temperature': renamed('TEMPERATURE'),
  **each('load_from_prefill_dir prefill_cache_dir', absent('a prompt is read each time')),
  'autoregressive_decode_assert': absent('generated texts are not compared'),
  **each('prefill_key_axis_order prefill_value_axis_order', _CACHE),
  **each('ar_key_axis_order ar_value_axis_order', _CACHE),
  **each(
    'inference_microbenchmark_prefill_lengths inference_microbenchmark_stages'
    ' inference_microbenchmark_loop_iters inference_microbenchmark_log_file_path',
    absent('benchmarks/ measures training'),
  ),
}

# Flags of MaxText's convert_llama_ckpt.py, which is paxlite import.
CONVERT_LLAMA: dict[str, Answer] = {
  'base_model_path': renamed('--from=meta --path', 'both names work'),
  'maxtext_model_path': renamed('--to', 'both names work'),
  **each('save_training_ckpt save_decoding_ckpt', needless('one folder serves both')),
}
