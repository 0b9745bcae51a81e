"""Keys of seqax's configs, and what they are in paxlite."""

from paxlite.other_systems.answers import Answer, absent, each, instead, needless, renamed

KEYS: dict[str, Answer] = {
  'model.d_model': renamed('MODEL_DIMS'),
  'model.n_q_per_kv': renamed('NUM_KV_HEADS', 'NUM_HEADS divided by it'),
  'model.n_kv': renamed('NUM_KV_HEADS'),
  'model.d_head': renamed('DIMS_PER_HEAD'),
  'model.layers': renamed('NUM_LAYERS'),
  'model.d_ff': renamed('HIDDEN_DIMS'),
  'model.vocab': renamed('VOCAB_SIZE'),
  'model.rope_max_timescale': renamed('ROPE_THETA'),
  'training.seed': renamed('SEED'),
  'training.tokens.batch': renamed('PERCORE_BATCH_SIZE', 'sequences of a batch / devices'),
  'training.tokens.len': renamed('MAX_SEQ_LEN'),
  'training.steps': renamed('MAX_STEPS'),
  'training.warmup_steps': renamed('LR_COS_WARMUP'),
  'training.steps_for_lr': renamed('LR_COS_DECAY_END'),
  'training.learning_rate': renamed('LEARNING_RATE'),
  'training.cosine_learning_rate_final_fraction': renamed('LR_COS_MIN_RATIO'),
  'training.adam_b1': renamed('ADAM_BETA1'),
  'training.adam_b2': renamed('ADAM_BETA2'),
  'training.adam_eps': renamed('ADAM_EPSILON'),
  'training.adam_eps_root': renamed('ADAM_EPSILON_ROOT'),
  'training.weight_decay': renamed('WEIGHT_DECAY'),
  'flat_tokens.filespec': renamed('DATASET_PATH', 'the same files are read'),
  'flat_tokens.seed': renamed('SEED'),
  'flat_tokens.sequence_packing': renamed('PACKED_INPUT'),
  **each(
    'flat_tokens.streams flat_tokens.read_blocks_per_shuffle_buffer'
    ' flat_tokens.sequences_per_read_block',
    needless('sequences are shuffled over the whole dataset, without a buffer'),
  ),
  'hf_dataset.path': renamed('TRAIN_SOURCES', 'hf:NAME:CONFIGURATION/SPLIT'),
  'hf_dataset.name': renamed('TRAIN_SOURCES', 'hf:NAME:CONFIGURATION/SPLIT'),
  'hf_dataset.tokenizer': renamed('VOCAB_PATH'),
  'hf_dataset.num_workers': needless('a thread reads two batches ahead'),
  'hf_dataset.sequences_packed_per_batch': needless(
    'with PACKED_INPUT=True, sequences are packed until they are full'
  ),
  **each(
    'paths.root_working_dir paths.model_name', instead('--job_log_dir=FOLDER is the run folder')
  ),
  'checkpoint_interval': renamed('CHECKPOINT_EVERY_N_STEPS'),
  'num_hosts': instead('--num_hosts, or nothing in a Slurm step'),
  'io.max_io_threads': absent('Orbax chooses the number of threads'),
  'mesh.d': instead('It is the size of the mesh axis data, the second number in ICI_MESH_SHAPE'),
  'mesh.t': instead('It is the size of the mesh axis mdl, the third number in ICI_MESH_SHAPE'),
}
