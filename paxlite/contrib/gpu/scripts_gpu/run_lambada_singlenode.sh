#!/usr/bin/env bash
# Evaluates a run of run_pile_singlenode.sh on LAMBADA; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
$SCRIPT TFDS_DATA_DIR VOCAB_PATH \\
  [PRECISION] [NUM_GPUS] [PERCORE_BATCH_SIZE] [LOGDIR] [MORE_FLAGS …]

Evaluates the last checkpoint in LOGDIR, of a run of Pile126M, zero-shot on LAMBADA.
TEXT
  pile_usage
  cat <<TEXT

Example:
  bash $SCRIPT /data/tfds /data/c4.model bfloat16 8 4 logs/pile
TEXT
}

read_pile_arguments "$@"
[[ -d $LOGDIR/checkpoints ]] ||
  fail "LOGDIR='$LOGDIR' holds no checkpoint" "on $(hostname)" 'first run_pile_singlenode.sh'
set_xla Lambada126M 0.85
exec_main --fdl_config=Lambada126M --mode=eval "${FLAGS[@]}" \
  --fdl.DCN_MESH_SHAPE='[1,1,1]' "${@:7}"
