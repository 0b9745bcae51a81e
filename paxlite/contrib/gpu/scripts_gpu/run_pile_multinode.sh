#!/usr/bin/env bash
# One task of a Slurm step that trains GPT126M on the Pile; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
$SCRIPT TFDS_DATA_DIR VOCAB_PATH \\
  [PRECISION] [NUM_GPUS] [PERCORE_BATCH_SIZE] [LOGDIR] [MORE_FLAGS …]

One task of a Slurm step that trains Pile126M by data parallelism on the GPUs of all nodes.
scripts/example_slurm_pile.sub starts it. LOGDIR must be the same folder on all nodes.
TEXT
  pile_usage
  cat <<TEXT

Example, inside of a job of 2 nodes:
  srun --ntasks-per-node=8 bash $SCRIPT \\
    /data/tfds /data/c4.model bfloat16 8 4 /shared/logs/pile
TEXT
}

read_pile_arguments "$@"
check_slurm "$NUM_GPUS"
set_multiprocess
set_xla Pile126M 0.85
exec_main --fdl_config=Pile126M "${FLAGS[@]}" --fdl.DCN_MESH_SHAPE="[$SLURM_JOB_NUM_NODES,1,1]" \
  "${MULTIPROCESS[@]}" "${@:7}"
