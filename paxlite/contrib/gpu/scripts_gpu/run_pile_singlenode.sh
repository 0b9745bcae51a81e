#!/usr/bin/env bash
# Trains GPT126M on the Pile, on the GPUs of this machine; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
$SCRIPT TFDS_DATA_DIR VOCAB_PATH \\
  [PRECISION] [NUM_GPUS] [PERCORE_BATCH_SIZE] [LOGDIR] [MORE_FLAGS …]

Trains Pile126M by data parallelism on the GPUs of this machine.
TEXT
  pile_usage
  cat <<TEXT

Example:
  bash $SCRIPT /data/tfds /data/c4.model bfloat16 8 4 logs/pile
TEXT
}

read_pile_arguments "$@"
set_xla Pile126M 0.85
exec_main --fdl_config=Pile126M "${FLAGS[@]}" --fdl.DCN_MESH_SHAPE='[1,1,1]' "${@:7}"
