"""Names of Pax: flags, experiments, attributes, converters and variables, and what they are here.

The names are those of paxml's main.py, tasks/lm/model_params.py, tasks/lm/params/c4.py and
contrib/gpu/scripts_gpu, of the checkpoint converter in JAX-Toolbox, and of saxml's
convert_llama_ckpt.py. A parameter called accepted names the values with which main takes a flag
that changes nothing here.
"""

from paxlite.other_systems.answers import (
  SAME,
  Answer,
  absent,
  each,
  instead,
  needless,
  renamed,
  same,
)

_ONE_BY_ONE = 'start one run for each trial'
_CLASS = 'write a class with its numbers, as in README.md; LanguageModel is the base class'
_SIZES = needless('the checkpoint names its own sizes')
_MLP = absent("it belongs to Pax's classifier, and paxlite trains language models")
_BERT = absent('every model predicts the next token')

MODES: dict[str, Answer] = {
  **each('train eval decode', SAME),
  'decode_once': same('as --mode=decode, which decodes one checkpoint too'),
  'infer': instead('--mode=decode continues the prompts of DECODE_FILES'),
  **each(
    'tf_data_service_dispatcher tf_data_service_worker',
    absent('each process reads its own sequences, without a data service'),
  ),
}

FLAGS: dict[str, Answer] = {
  **each('fdl_config fiddler job_log_dir enable_checkpoint_saving tfds_data_dir', SAME),
  **each('multiprocess_gpu server_addr num_hosts host_idx jax_profiler_port', SAME),
  'fdl': same('--fdl.NAME=VALUE'),
  'exp': same('it takes bare and dotted names, as --fdl_config does'),
  'mode': same('see the next table'),
  'eval_on_test': needless(
    'training evaluates on held-out data every EVAL_INTERVAL_STEPS, and EVAL_SPLIT names the split',
    'any',
  ),
  'decode_during_train': instead(
    'SAMPLE_PROMPTS are continued at each evaluation of a training run', 'false'
  ),
  'eval_during_decode': absent('paxlite eval RUN evaluates a checkpoint', 'false'),
  'restore_checkpoint_dir': instead(
    'Use --fdl.CHECKPOINT_RESTORE_PATH=FOLDER and a --job_log_dir without checkpoints'
  ),
  'restore_checkpoint_step': instead(
    '--fdl.CHECKPOINT_RESTORE_PATH may name one checkpoint_%08d in a folder of checkpoints'
  ),
  'jax_fully_async_checkpoint': needless(
    'checkpoints are always written while training continues', 'any'
  ),
  'maybe_use_persistence_checkpointing': needless('there is one way to save', 'any'),
  'tensorstore_use_ocdbt': needless('checkpoints are plain zarr folders', 'any'),
  'enforce_restore_shape_check': needless('shapes are always compared', 'any'),
  'exit_after_ondemand_checkpoint': needless(
    'a job that is preempted saves and always exits', 'any'
  ),
  'checkpoint_todelete_subdir': absent('checkpoints beyond CHECKPOINT_MAX_TO_KEEP are deleted'),
  'decode_output_pickle': needless('decoded texts are written as JSON lines', 'any'),
  'globally_use_hardware_rng': needless('random numbers come from JAX', 'any'),
  'enable_auto_sharding': absent(
    'shardings follow ICI_MESH_SHAPE and DCN_MESH_SHAPE, which paxlite plan can choose', 'false'
  ),
  'jax_traceback_filtering_option': instead('Set JAX_TRACEBACK_FILTERING in the environment'),
  'jax_xla_backend': instead('Set JAX_PLATFORMS in the environment'),
  'jax_backend_target': absent('a run uses the devices of its machine'),
  'jax_enable_checks': instead('Set JAX_ENABLE_CHECKS in the environment'),
  **each(
    'jax_array_in_pax jax_parallel_functions_output_gda use_orbax',
    needless('it chose between methods of an older Pax', 'any'),
  ),
  **each(
    'study controller_mode tuner_group metrics_from num_trials pythia_port', absent(_ONE_BY_ONE)
  ),
  'alsologtostderr': same('it changes nothing: logs go to stderr anyway'),
  'logtostderr': needless('logs go to stderr anyway', 'any'),
}

# Classes of Pax, by the last part of their path.
EXPERIMENTS: dict[str, Answer] = {
  **each('Synthetic126M Synthetic5B Synthetic175B Pile126M Pile5B Pile175B', SAME),
  **each('Lambada126M PileGLaM126M64E PileGLaM64B64E', SAME),
  **each('LambadaGLaM126M64E LambadaGLaM64B64E LLaMA7B LLaMA13B LLaMA70B GPT126M', SAME),
  'GPT126MBase': renamed('GPT126M', 'configs.py has both names'),
  'GPT5BBase': renamed('GPT5B', 'configs.py has both names'),
  'GPT175BBase': renamed('GPT175B', 'configs.py has both names'),
  'GLaM126M64EBase': renamed('GLaM126M64E', 'configs.py has both names'),
  'GLaM64B64EBase': renamed('GLaM64B64E', 'configs.py has both names'),
  'BaseLLaMA': renamed('LLaMA', 'a class to derive from; configs.py has both names'),
  'GPT5B': same("with Pax's path it is Pile5B, as in Pax; the bare name is the model without data"),
  'GPT175B': same(
    "with Pax's path it is Pile175B, as in Pax; the bare name is the model without data"
  ),
  'PileUnsupervisedDataset': renamed('Pile', 'a dataset; configs.py has both names'),
  'LambadaDataset': renamed('Lambada', 'a dataset; configs.py has both names'),
  'BoolQDataset': renamed('BoolQ', 'a dataset; configs.py has both names'),
  'C4UnsupervisedDataset': renamed('C4', 'a dataset; configs.py has both names'),
  'SyntheticDataset': renamed('Synthetic', 'a dataset; configs.py has both names'),
  'LoRAMixin': needless('every language model has USE_LORA, LORA_RANK and LORA_TARGET_LAYERS'),
  'CheckpointRestoreMixin': needless('every experiment has CHECKPOINT_RESTORE_PATH'),
  'TransformerLmSpmdAdam': renamed('LanguageModel', 'paxlite/experiments/language_model.py'),
  **each(
    'TransformerLmSpmdAdafactor TransformerLmSpmdPipelineAdafactor',
    renamed('LanguageModel', 'with OPTIMIZER=adafactor'),
  ),
  'TransformerLmPmapAdam': renamed('LanguageModel', 'the mesh says how devices share the work'),
  'TransformerLmSpmdPipelineAdam': renamed(
    'LanguageModel', 'a pipeline is the mesh axis stage: docs/pipelines.md'
  ),
  **each('TransformerBertPmapAdam TransformerBertSpmdAdafactor', _BERT),
  'ClassificationModelAdam': _MLP,
  **each('C4SpmdAdam C4SpmdPipelineAdam LmCloudSpmdAdam LmCloudSpmdAdamLimitSteps', absent(_CLASS)),
  **each(
    'C4SpmdGpt3AdamOrgHP C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas C4SpmdGpt3L16AdamOrgHP'
    ' C4SpmdPipelineGpt3AdamOrgHP C4SpmdPipelineGpt3AdamMLPerfHP'
    ' C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas'
    ' C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas'
    ' C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas'
    ' C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas'
    ' C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas'
    ' C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas C4SpmdPipelineGpt3SmallAdam8Replicas',
    absent('C4GPT175B is GPT-3 on C4; for the other numbers, write a class derived from it'),
  ),
  **each(
    'C4Spmd1BAdam4Replicas C4Spmd1BAdam4ReplicasLimitSteps C4Spmd2BAdam4Replicas'
    ' C4Spmd16BAdam32Replicas C4Spmd32BAdam64Replicas',
    absent(_CLASS),
  ),
}

ATTRIBUTES: dict[str, Answer] = {
  # The same: the mesh, the model, the optimizer, the schedule, the loop
  **each('ICI_MESH_SHAPE DCN_MESH_SHAPE PERCORE_BATCH_SIZE MAX_SEQ_LEN NUM_MICROBATCHES', SAME),
  **each('NUM_LAYERS NUM_HEADS NUM_KV_HEADS MODEL_DIMS HIDDEN_DIMS DIMS_PER_HEAD VOCAB_SIZE', SAME),
  **each('FPROP_DTYPE PACKED_INPUT USE_REPEATED_LAYER CHECKPOINT_POLICY NUM_EXPERTS', SAME),
  **each('SEPARATE_EMBEDDING TRAINABLE_POSITION_EMB USE_ROTARY_POSITION_EMB NORM_POLICY', SAME),
  **each('ACTIVATION_CLS USE_GATED_ACTIVATION USE_BIAS LAYERNORM_EPSILON USE_FP8', SAME),
  **each('SOFTMAX_CAP_LOGITS ATTEN_LOGIT_CAP DROPOUT_PROB INIT_STD SOFTMAX_INIT_STD', SAME),
  **each('LEARNING_RATE ADAM_BETA1 ADAM_BETA2 ADAM_EPSILON ADAM_EPSILON_ROOT WEIGHT_DECAY', SAME),
  **each('ADAM_CLIP_THRESHOLD CLIP_GRADIENT_NORM_TO_VALUE LR_SCHEDULE', SAME),
  **each('LR_COS_WARMUP LR_COS_DECAY_START LR_COS_DECAY_END LR_COS_MIN_RATIO LR_COS_MAX', SAME),
  **each('LR_LRED_WARMUP LR_LRED_DECAY_START LR_LRED_DECAY_END LR_LRED_MIN_RATIO', SAME),
  **each('LR_LRED_MAX MAX_STEPS CHECKPOINT_EVERY_N_STEPS CHECKPOINT_MAX_TO_KEEP', SAME),
  **each('SUMMARY_INTERVAL_STEPS EVAL_INTERVAL_STEPS PROFILER_NUM_STEPS', SAME),
  **each('PROFILER_CAPTURE_STEP USE_LORA LORA_RANK LORA_TARGET_LAYERS', SAME),
  **each('CHECKPOINT_RESTORE_PATH CHECKPOINT_IGNORE_RULES', SAME),
  # Attention and embeddings
  'USE_MQA': renamed('NUM_KV_HEADS', '1 is multi-query attention'),
  'USE_CUDNN_FLASH_ATTENTION': renamed('USE_FLASH_ATTENTION', 'on by default if there is a kernel'),
  'COMBINE_QKV': needless('queries, keys and values share a matrix if their sizes allow it'),
  'RELATIVE_BIAS': renamed('RELATIVE_BIAS_BUCKETS', 'GLaM has it'),
  'REL_POS_EMB_DIM': absent('positions are learned, sinusoidal, rotary or a relative bias'),
  'ENABLE_DCONV': absent('projections have no depthwise convolution'),
  'EMBEDDING_LOOKUP_STYLE': needless('rows of the table are gathered, with the same result'),
  'TRAINABLE_PE_MAX_SEQ_LEN': renamed(
    'MAX_POSITION_EMBEDDINGS', 'the size of the table of learned positions'
  ),
  'RMS_NORM_EPSILON': renamed('LAYERNORM_EPSILON'),
  'INPUT_DROPOUT_PROB': renamed('EMBEDDING_DROPOUT_PROB'),
  'ACTIVATION': renamed('ACTIVATION_CLS', 'gelu, relu, silu'),
  'MODEL_DTYPE': needless('trained parameters are float32; the computation is in FPROP_DTYPE'),
  'ENABLE_BFLOAT16': renamed('FPROP_DTYPE', 'bfloat16 is the default'),
  'MODEL_CLASS': instead('task() says which model is trained: docs/experiments.md'),
  'ENABLE_TE': renamed('USE_TE', 'ENABLE_TE=1 in the environment works too'),
  'ENABLE_FP8': renamed('TE_RECIPE', 'ENABLE_FP8=1 in the environment works too; USE_FP8 uses XLA'),
  # Experts
  'LOAD_BALANCING_WEIGHT': renamed('AUX_LOSS_COEF'),
  'Z_LOSS_WEIGHT': SAME,
  'NUM_GPUS': instead('It follows from ICI_MESH_SHAPE × DCN_MESH_SHAPE'),
  # Pipeline
  'NUM_STAGES': instead('A pipeline is the mesh axis stage: docs/pipelines.md'),
  'MICROBATCH_SIZE': renamed(
    'NUM_MICROBATCHES', 'sequences of a batch / sequences of a microbatch'
  ),
  'MICROBATCH_SIAZE': renamed(
    'NUM_MICROBATCHES', 'sequences of a batch / sequences of a microbatch'
  ),
  'CIRCULAR_REPEAT': renamed('NUM_PIPELINE_REPEATS'),
  'STREAM_IO': needless('the pipeline has one way to move its inputs'),
  'PIPELINE_BROADCAST_INPUTS': needless('the pipeline has one way to move its inputs'),
  'EMB_W_DATA_DIMS': needless('the embedding is sharded as parallel/partitioning.py says'),
  # Optimizer, schedule, loop
  'DECAY_END': renamed('LR_LRED_DECAY_END'),
  'EMA_DECAY': SAME,
  'TARGET_LOG_PPLX': absent(
    'a run ends at MAX_STEPS, or after EARLY_STOPPING_PATIENCE evaluations without improvement'
  ),
  'NUM_TRAIN_STEPS': renamed('MAX_STEPS'),
  'CHECKPOINT_SAVE_MAX_TO_KEEP': renamed('CHECKPOINT_MAX_TO_KEEP'),
  'PROFILER_MIN_DURATION_SEC': needless('the profile has PROFILER_NUM_STEPS steps'),
  'EVAL_SKIP_TRAIN': needless('evaluation uses held-out data only'),
  'TRAINING_OPTIMIZED_SHARDING': needless('activations are always sharded for training'),
  'MESH_SHAPE': renamed('ICI_MESH_SHAPE'),
  # Data
  'BATCH_SIZE': renamed('PERCORE_BATCH_SIZE', 'sequences per device'),
  'PERCORE_EVAL_BATCH_SIZE': renamed('EVAL_BATCH_SIZE', 'sequences on all devices together'),
  'TRAINING_SEED': renamed('SEED'),
  'TRAIN_INPUT_RANDOM_SEED': renamed('SEED'),
  'TRAINING_NUM_BATCHES_TO_SKIP': needless('a checkpoint holds the position in the data'),
  'TRAIN_MIXTURE': renamed('SEQIO_TASK', 'SEQIO_MODULES registers your own tasks'),
  'EVAL_MIXTURE': renamed('EVAL_SPLIT', 'a split of the same task'),
  'SPM_MODEL': renamed('VOCAB_PATH'),
  'BOS_ID': renamed('START_ID'),
  'EOS_ID': renamed('EOS_IDS'),
  **each('TRUE_TOKEN FALSE_TOKEN', needless("the task's tokenizer encodes its answers")),
  # Models that paxlite does not have
  **each('MASK_TOKEN_ID FORCE_MASK_GENERATION', _BERT),
  **each('INPUT_DIM OUTPUT_DIM MLP_WEIGHT_SHARDING SOFTMAX_WEIGHT_SHARDING', _MLP),
  'HIDDEN_DIM': renamed('HIDDEN_DIMS'),
  'LAYERS': renamed('NUM_LAYERS'),
  'LR': renamed('LEARNING_RATE'),
}

# Paths of Pax's repository and of JAX-Toolbox's, and what they are in the checkout of paxlite
SCRIPTS: dict[str, Answer] = {
  'paxml/main.py': instead('paxlite train; python -m paxlite.main has the flags of Pax'),
  'paxml/contrib/gpu/scripts_gpu/': renamed('paxlite/contrib/gpu/scripts_gpu/'),
  'rosetta/projects/pax/scripts/': renamed('scripts/'),
  'launch_base_config.sub': renamed('launch_base_script.sub', 'both names work'),
}

# Flags of JAX-Toolbox's te_pax_t5x_ckpt_converter, which is paxlite convert-te.
CONVERT_TE: dict[str, Answer] = {
  'direction': SAME,
  'input_path': renamed('--checkpoint', 'both names work'),
  'output_path': renamed('--path', 'both names work'),
  'fw': needless("the checkpoint is paxlite's; paxlite import reads Pax's"),
  **each('num_of_layer num_of_head head_dim mlp_intermediate_dim embed_dim', _SIZES),
  **each('use_gated_activations pax_repeat pax_split_qkv num_gqa_groups te_qkv_layout', _SIZES),
  'kernel_chunk_size': needless('variables are written one by one'),
  'weight_only': needless("Adam's moments are converted if the checkpoint has them"),
  'skip_ln': absent('the scales and biases of norms are always converted'),
  'skip_bias': absent('a model without biases has none to convert'),
  't5x_fuse_qkv': absent("checkpoints are paxlite's or Pax's"),
}

# Flags of saxml's convert_llama_ckpt.py, which is paxlite import. Its older versions have the
# long names.
CONVERT_LLAMA: dict[str, Answer] = {
  **each('base base_model_path', renamed('--from=meta --path', 'both names work')),
  **each('pax pax_model_path', renamed('--to', 'both names work')),
  'skip_bias': needless('the weights name their own tensors, and LLaMA has no biases'),
  'model_size': needless('the weights name their own sizes'),
}

# Variables that the scripts of Pax set or read.
VARIABLES: dict[str, Answer] = {
  **each('XLA_FLAGS BASE_XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION ENABLE_TE ENABLE_FP8', SAME),
  **each('NVTE_FUSED_ATTN TFDS_DATA_DIR VOCAB_PATH EVAL_ONLY USE_LORA USE_MULTIPROCESS', SAME),
  **each('CONFIG LOG_DIR LORA_RANK LORA_TARGET_LAYERS LEARNING_RATE LR_SCHEDULE', SAME),
  **each('LR_COS_WARMUP MAX_STEPS PERCORE_BATCH_SIZE MAX_SEQ_LEN ICI_MESH_SHAPE', SAME),
  **each('DCN_MESH_SHAPE USE_REPEATED_LAYER CHECKPOINT_RESTORE_PATH', SAME),
  **each(
    'NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN',
    same('run_llama_boolq.sh sets 4 as in Pax, unless it is set; for USE_TE=layer'),
  ),
  'NCCL_IB_SL': needless("run_llama_boolq.sh sets 0 in Pax, which is NCCL's default"),
  'NCCL_PROTO': needless(
    'run_llama_boolq.sh sets LL128 in Pax; NCCL chooses it if the links are safe for it; '
    'elsewhere it may corrupt data'
  ),
  'CUDA_DEVICE_MAX_CONNECTIONS': needless('if you set it, it is passed on'),
}
