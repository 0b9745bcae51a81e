#!/usr/bin/env bash
# Trains any experiment, alone or as one task of a Slurm step; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
$SCRIPT CONFIG \\
  [PREC] [NUM_GPUS] [LOG_DIR] [TFDS_DATA_DIR] [VOCAB_PATH] [ADDITIONAL_ARGS] [MORE_FLAGS …]

Trains any experiment, alone or as one task of a Slurm step, as scripts/launch_base_script.sub
starts it.

  CONFIG           an experiment: Synthetic5B, or my.module.MyExperiment
  PREC             bfloat16, float32 or float16 (bfloat16)
  NUM_GPUS         GPUs of a node (8)
  LOG_DIR          where checkpoints and metrics are, the same folder on all nodes (test_logdir)
  TFDS_DATA_DIR    folder of TFDS datasets, or None (the environment's, or None)
  VOCAB_PATH       SentencePiece model or tokenizer.json, or none (the environment's, or none)
  ADDITIONAL_ARGS  one string of flags of paxlite.main, split at blanks ("")
  MORE_FLAGS       further ones, as they are

The mesh is the experiment's: on another number of GPUs, ADDITIONAL_ARGS says so.
TEXT
  environment_usage 0.9
  cat <<TEXT
  PERCORE_BATCH_SIZE              rows of a batch a GPU (the experiment's)

Example:
  bash $SCRIPT Synthetic126M bfloat16 8 logs/126m None none \\
    '--fdl.DCN_MESH_SHAPE=[1,1,1] --fdl.MAX_STEPS=100'
TEXT
}

help_if_asked "$@"
CONFIG=${1:-}
PREC=${2:-bfloat16}
NUM_GPUS=${3:-8}
LOG_DIR=${4:-test_logdir}
TFDS_DATA_DIR=${5:-${TFDS_DATA_DIR:-None}}
VOCAB_PATH=${6:-${VOCAB_PATH:-none}}
ADDITIONAL_ARGS=${7:-}

check_given CONFIG "$CONFIG"
check_precision PREC "$PREC"
check_count NUM_GPUS "$NUM_GPUS"
check_writable LOG_DIR "$LOG_DIR"
flags=(--fdl_config="$CONFIG" --job_log_dir="$LOG_DIR" --fdl.FPROP_DTYPE="$PREC")
if [[ ${TFDS_DATA_DIR,,} != none ]]; then
  check_folder TFDS_DATA_DIR "$TFDS_DATA_DIR"
  flags+=(--tfds_data_dir="$TFDS_DATA_DIR")
fi
# There is no flag, because an experiment without a tokenizer does not have this attribute.
if [[ ${VOCAB_PATH,,} == none ]]; then
  unset VOCAB_PATH
else
  check_path VOCAB_PATH "$VOCAB_PATH"
  export VOCAB_PATH
fi
if [[ -n ${PERCORE_BATCH_SIZE:-} ]]; then
  check_number PERCORE_BATCH_SIZE "$PERCORE_BATCH_SIZE"
  flags+=(--fdl.PERCORE_BATCH_SIZE="$PERCORE_BATCH_SIZE")
fi
read -r -d '' -a additional <<<"$ADDITIONAL_ARGS" || true # read finds no delimiter and fails
if [[ -n ${SLURM_STEP_NUM_TASKS:-} ]]; then check_slurm "$NUM_GPUS"; fi
check_python

set_multiprocess
set_xla "$CONFIG" 0.9
exec_main "${flags[@]}" "${MULTIPROCESS[@]}" "${additional[@]}" "${@:8}"
