#!/usr/bin/env bash
# Fine-tunes a LLaMA on BoolQ and evaluates it, or only evaluates it; see --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<TEXT
$SCRIPT [MORE_FLAGS …]

Fine-tunes a LLaMA on BoolQ, with all of its weights (SFT) or with LoRA, and evaluates it zero-shot;
or evaluates weights that are there. MORE_FLAGS go to paxlite.main, in training and in evaluation.

Environment:
  VOCAB_PATH               the model's tokenizer (required)
  TFDS_DATA_DIR            folder of TFDS datasets; download_boolq.py fills it (required)
  CONFIG                   LLaMA7B, LLaMA13B, LLaMA70B, or one of your own on BoolQ (LLaMA7B)
  CHECKPOINT_RESTORE_PATH  imported weights or a job_log_dir: what training starts from, or with
                           EVAL_ONLY=1 what is evaluated (none)
  EVAL_ONLY                1: no training (0)
  LOG_DIR                  the run is in LOG_DIR/llama-CONFIG-mbs-…-te-…-lora-…, and what it
                           prints in a file of that name with .log (./llama_logs)
  USE_MULTIPROCESS         1: this is one task of a Slurm step (0)
  USE_LORA                 1: LoRA; give it for the evaluation of such a run too (0)
  LORA_RANK                (32)
  LORA_TARGET_LAYERS       all, attention or mlp (all)
  LEARNING_RATE            (1e-6; LoRA: 1e-4)
  LR_SCHEDULE              (linear_rampup_cosine_decay; LoRA: constant)
  LR_COS_WARMUP            steps of warmup of the former, which decays to MAX_STEPS (500)
  MAX_STEPS                (1000; LoRA: 600)
  PERCORE_BATCH_SIZE       rows of a batch a GPU (2)
  MAX_SEQ_LEN              (4096)
  PREC                     bfloat16, float32 or float16 (bfloat16)
  ICI_MESH_SHAPE           mesh within a node ([1,8,1]; LoRA: [8,1,1])
  DCN_MESH_SHAPE           nodes ([1,2,1]; LoRA: [1,1,1])
  USE_REPEATED_LAYER       True or False (False)
  ENABLE_TE                1: Transformer Engine's products (0)
  NVTE_FWD_LAYERNORM_SM_MARGIN, NVTE_BWD_LAYERNORM_SM_MARGIN  SMs that its norms leave free (4)
  NVTE_FUSED_ATTN          1: its layers may take cuDNN's attention (what it takes by itself)
  PYTHON, BASE_XLA_FLAGS, XLA_FLAGS, XLA_PYTHON_CLIENT_MEM_FRACTION (0.85): as in the other scripts

The exit code is that of training where that is not 0, else of the evaluation. 75 means that the
state is saved, and training goes on when this is started again; then nothing is evaluated. The
tasks of a Slurm step train and evaluate together.

Example:
  VOCAB_PATH=/data/llama.model TFDS_DATA_DIR=/data/tfds USE_LORA=1 \\
    CHECKPOINT_RESTORE_PATH=/data/llama7b bash $SCRIPT
TEXT
}

help_if_asked "$@"
VOCAB_PATH=${VOCAB_PATH:-}
TFDS_DATA_DIR=${TFDS_DATA_DIR:-}
CONFIG=${CONFIG:-LLaMA7B}
CHECKPOINT_RESTORE_PATH=${CHECKPOINT_RESTORE_PATH:-}
EVAL_ONLY=${EVAL_ONLY:-0}
LOG_DIR=${LOG_DIR:-llama_logs}
USE_MULTIPROCESS=${USE_MULTIPROCESS:-0}
USE_LORA=${USE_LORA:-0}
LORA_RANK=${LORA_RANK:-32}
LORA_TARGET_LAYERS=${LORA_TARGET_LAYERS:-all}
if [[ $USE_LORA == 1 ]]; then
  LEARNING_RATE=${LEARNING_RATE:-1e-4}
  LR_SCHEDULE=${LR_SCHEDULE:-constant}
  MAX_STEPS=${MAX_STEPS:-600}
  ICI_MESH_SHAPE=${ICI_MESH_SHAPE:-[8,1,1]}
  DCN_MESH_SHAPE=${DCN_MESH_SHAPE:-[1,1,1]}
else
  LEARNING_RATE=${LEARNING_RATE:-1e-6}
  LR_SCHEDULE=${LR_SCHEDULE:-linear_rampup_cosine_decay}
  MAX_STEPS=${MAX_STEPS:-1000}
  ICI_MESH_SHAPE=${ICI_MESH_SHAPE:-[1,8,1]}
  DCN_MESH_SHAPE=${DCN_MESH_SHAPE:-[1,2,1]}
fi
LR_COS_WARMUP=${LR_COS_WARMUP:-500}
PERCORE_BATCH_SIZE=${PERCORE_BATCH_SIZE:-2}
MAX_SEQ_LEN=${MAX_SEQ_LEN:-4096}
PREC=${PREC:-bfloat16}
USE_REPEATED_LAYER=${USE_REPEATED_LAYER:-False}
ENABLE_TE=${ENABLE_TE:-0}

check_given VOCAB_PATH "$VOCAB_PATH"
check_path VOCAB_PATH "$VOCAB_PATH"
check_given TFDS_DATA_DIR "$TFDS_DATA_DIR"
check_folder TFDS_DATA_DIR "$TFDS_DATA_DIR"
for name in EVAL_ONLY USE_MULTIPROCESS USE_LORA ENABLE_TE; do
  check_one_of "$name" "${!name}" 0 1
done
for name in LORA_RANK MAX_STEPS LR_COS_WARMUP MAX_SEQ_LEN; do check_count "$name" "${!name}"; done
for name in LEARNING_RATE PERCORE_BATCH_SIZE; do check_number "$name" "${!name}"; done
for name in ICI_MESH_SHAPE DCN_MESH_SHAPE; do check_shape "$name" "${!name}"; done
check_one_of LORA_TARGET_LAYERS "$LORA_TARGET_LAYERS" all attention mlp
check_one_of LR_SCHEDULE "$LR_SCHEDULE" \
  constant linear_rampup_cosine_decay linear_rampup_exponential_decay
check_one_of USE_REPEATED_LAYER "$USE_REPEATED_LAYER" True False
if [[ -n ${NVTE_FUSED_ATTN:-} ]]; then check_one_of NVTE_FUSED_ATTN "$NVTE_FUSED_ATTN" 0 1; fi
check_precision PREC "$PREC"
if [[ -n $CHECKPOINT_RESTORE_PATH ]]; then
  check_folder CHECKPOINT_RESTORE_PATH "$CHECKPOINT_RESTORE_PATH"
elif [[ $EVAL_ONLY == 1 ]]; then
  fail 'CHECKPOINT_RESTORE_PATH is missing' 'EVAL_ONLY=1' 'give imported weights or a job_log_dir'
fi
check_writable LOG_DIR "$LOG_DIR"
if [[ $USE_MULTIPROCESS == 1 && -z ${SLURM_STEP_NUM_TASKS:-} ]]; then
  fail 'USE_MULTIPROCESS=1 is for a task of a Slurm step' "$SCRIPT" 'leave it out, or use srun'
fi
check_python

run=llama-$CONFIG-mbs-$PERCORE_BATCH_SIZE-te-$ENABLE_TE-lora-$USE_LORA
flags=(
  --fdl_config="$CONFIG"
  --tfds_data_dir="$TFDS_DATA_DIR"
  --fdl.VOCAB_PATH="$VOCAB_PATH"
  --fdl.FPROP_DTYPE="$PREC"
  --fdl.PERCORE_BATCH_SIZE="$PERCORE_BATCH_SIZE"
  --fdl.MAX_SEQ_LEN="$MAX_SEQ_LEN"
  --fdl.ICI_MESH_SHAPE="$ICI_MESH_SHAPE"
  --fdl.DCN_MESH_SHAPE="$DCN_MESH_SHAPE"
  --fdl.USE_REPEATED_LAYER="$USE_REPEATED_LAYER"
  --fdl.LEARNING_RATE="$LEARNING_RATE"
  --fdl.LR_SCHEDULE="$LR_SCHEDULE"
  --fdl.MAX_STEPS="$MAX_STEPS"
)
if [[ $LR_SCHEDULE == linear_rampup_cosine_decay ]]; then
  flags+=(--fdl.LR_COS_WARMUP="$LR_COS_WARMUP" --fdl.LR_COS_DECAY_END="$MAX_STEPS")
fi
if [[ $USE_LORA == 1 ]]; then
  flags+=(--fdl.USE_LORA=True --fdl.LORA_RANK="$LORA_RANK")
  flags+=(--fdl.LORA_TARGET_LAYERS="$LORA_TARGET_LAYERS")
fi
if [[ $USE_MULTIPROCESS == 1 ]]; then
  set_multiprocess
  flags+=("${MULTIPROCESS[@]}")
fi
restore=()
if [[ -n $CHECKPOINT_RESTORE_PATH ]]; then
  restore=(--fdl.CHECKPOINT_RESTORE_PATH="$CHECKPOINT_RESTORE_PATH")
fi
export ENABLE_TE
# SMs that Transformer Engine's norms leave to collectives, as in Pax
export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-4}
export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-4}

# Runs paxlite.main and returns its exit code.
run_main() {
  local main signal='' code
  "$PYTHON" -u -m paxlite.main "$@" &
  main=$!
  # In a step of Slurm, every process gets the signal from Slurm.
  trap 'signal=1; [[ -n ${SLURM_STEP_ID:-} ]] || kill -TERM "$main"' TERM INT
  while true; do
    signal=''
    code=0
    wait "$main" || code=$?
    [[ -n $signal ]] || return "$code" # a signal ends the wait, but not the process
  done
}

# Computes only the log-likelihoods of the answers; training has reported the loss already.
evaluate() {
  run_main --mode=eval --fdl.EVAL_SPLIT=None "$@"
}

mkdir -p -- "$LOG_DIR"
log=$LOG_DIR/$run.log
if ((${SLURM_PROCID:-0} > 0)); then log=$LOG_DIR/$run.$SLURM_PROCID.log; fi
exec > >(trap '' INT TERM && exec tee -a -- "$log") 2>&1
tee=$!
trap 'exec >&- 2>&-; wait "$tee" || true' EXIT # so that its last lines are written

set_xla "$CONFIG" 0.85
if [[ $EVAL_ONLY == 0 ]]; then
  run_main --job_log_dir="$LOG_DIR/$run" "${flags[@]}" "${restore[@]}" "$@"
  evaluate --job_log_dir="$LOG_DIR/$run" "${flags[@]}" "${restore[@]}" "$@"
elif [[ -d $CHECKPOINT_RESTORE_PATH/checkpoints ]]; then
  evaluate --job_log_dir="$CHECKPOINT_RESTORE_PATH" "${flags[@]}" "$@"
else
  evaluate --job_log_dir="$LOG_DIR/$run-eval" "${flags[@]}" "${restore[@]}" "$@"
fi
