# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts that source this file use its variables
# Sourced by the scripts in this folder: checks, XLA's flags, and the call of paxlite.main.

SCRIPT=$(basename -- "$0")
PYTHON=${PYTHON:-python3}

# fail WHAT WHERE WAY_OUT
fail() {
  printf 'error: %s; %s; %s\n' "$1" "$2" "$3" >&2
  exit 2
}

help_if_asked() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit 0
  fi
}

# Each check takes the name of a variable or argument, and its value.

check_given() {
  [[ -n $2 ]] || fail "$1 is missing" "$SCRIPT needs it" "see $SCRIPT --help"
}

check_count() {
  [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || fail "$1='$2' is not a number" "$SCRIPT" "give 1, 2, 3 …"
}

check_number() {
  local number='^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$'
  [[ $2 =~ $number && ${2%%[eE]*} == *[1-9]* ]] ||
    fail "$1='$2' is not a number above 0" "$SCRIPT" "give one such as 4, 0.5 or 1e-4"
}

# check_one_of NAME VALUE CHOICE…
check_one_of() {
  local name=$1 value=$2 choice
  shift 2
  for choice; do
    if [[ $value == "$choice" ]]; then return; fi
  done
  fail "$name='$value' is not known" "$SCRIPT" "give one of $*"
}

check_precision() { check_one_of "$1" "$2" bfloat16 float32 float16; }

check_shape() {
  [[ $2 =~ ^\[\ *[1-9][0-9]*(\ *,\ *[1-9][0-9]*)*\ *\]$ ]] ||
    fail "$1='$2' is not the shape of a mesh" "$SCRIPT" "give sizes of axes such as [1,8,1]"
}

check_path() {
  [[ -e $2 ]] || fail "$1='$2' does not exist" "on $(hostname)" "give a file or folder that does"
}

check_folder() {
  [[ -d $2 ]] || fail "$1='$2' is not a folder" "on $(hostname)" "give one that exists"
}

# Checks a folder that exists and can be written, or that can be made.
check_writable() {
  local there
  check_given "$1" "$2"
  there=$(realpath -m -- "$2")
  while [[ ! -e $there ]]; do there=$(dirname -- "$there"); done
  [[ -d $there && -w $there && -x $there ]] ||
    fail "$1='$2' cannot be written" "$there on $(hostname)" "give a folder that can"
}

# Uses the paxlite that Python finds; otherwise the checkout that contains these scripts.
check_python() {
  local root found='from paxlite.core import errors; errors.check_interpreter()'
  command -v -- "$PYTHON" >/dev/null ||
    fail "PYTHON='$PYTHON' is not there" "on $(hostname)" "give the path of Python 3.12 or newer"
  if "$PYTHON" -c "$found" 2>/dev/null; then return; fi
  root=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../../../..")
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  "$PYTHON" -c "$found" 2>/dev/null ||
    fail "$PYTHON cannot import paxlite or a package that it needs" "on $(hostname)" \
      "give the Python of its environment"
}

# check_slurm NUM_GPUS: checks that this task's Slurm step shares each node's GPUs evenly.
check_slurm() {
  local num_gpus=$1 tasks share first
  [[ -n ${SLURM_STEP_NUM_TASKS:-} && -n ${SLURM_JOB_NUM_NODES:-} ]] ||
    fail 'this is no task of a Slurm step' "$SCRIPT" 'start it with srun, or by scripts/*.sub'
  tasks=$((SLURM_STEP_NUM_TASKS / SLURM_JOB_NUM_NODES))
  ((tasks > 0 && num_gpus % tasks == 0 && tasks * SLURM_JOB_NUM_NODES == SLURM_STEP_NUM_TASKS)) ||
    fail "$SLURM_STEP_NUM_TASKS tasks do not share $num_gpus GPUs a node evenly" \
      "$SLURM_JOB_NUM_NODES nodes" "give srun --ntasks-per-node=$num_gpus"
  share=$((num_gpus / tasks))
  if ((share > 1)); then # otherwise JAX gives a task of Slurm one GPU
    first=$((SLURM_LOCALID * share))
    JAX_LOCAL_DEVICE_IDS=$(seq -s, "$first" "$((first + share - 1))")
    export JAX_LOCAL_DEVICE_IDS
  fi
}

# Sets MULTIPROCESS. Other processes are required unless this is the only task.
set_multiprocess() {
  MULTIPROCESS=()
  if ((${SLURM_STEP_NUM_TASKS:-1} > 1 || ${SLURM_JOB_NUM_NODES:-1} > 1)); then
    MULTIPROCESS=(--multiprocess_gpu)
  fi
}

device() {
  if [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then echo gpu; else echo cpu; fi
}

# xla_flags CONFIG DEVICE: Pax's flags, as far as XLA still knows them (an unknown flag ends JAX).
# Today an empty xla_gpu_enable_command_buffer replaces xla_gpu_graph_level=0. The flags that made
# single collectives asynchronous and disabled a Triton fusion no longer exist.
xla_flags() {
  local combined=51200
  [[ $2 == gpu ]] || return 0
  # A small model combines all gradients in few messages. A large one sends each when it is ready.
  if [[ $1 == *126M* ]]; then combined=33554432; fi
  printf '%s ' --xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false \
    --xla_gpu_enable_highest_priority_async_stream=true --xla_gpu_enable_command_buffer=
  printf '%s' "--xla_gpu_all_reduce_combine_threshold_bytes=$combined"
}

# set_xla CONFIG MEM_FRACTION: sets and prints the environment of XLA.
set_xla() {
  local base=${BASE_XLA_FLAGS-$(xla_flags "$1" "$(device)")}
  export XLA_FLAGS=$base${XLA_FLAGS:+${base:+ }$XLA_FLAGS}
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-$2}
  printf 'XLA_PYTHON_CLIENT_MEM_FRACTION=%s XLA_FLAGS=%s\n' \
    "$XLA_PYTHON_CLIENT_MEM_FRACTION" "$XLA_FLAGS"
}

# Reads the arguments of the scripts for the Pile and LAMBADA. Sets their variables, and FLAGS.
read_pile_arguments() {
  help_if_asked "$@"
  TFDS_DATA_DIR=${1:-}
  VOCAB_PATH=${2:-}
  PREC=${3:-bfloat16}
  NUM_GPUS=${4:-8}
  PERCORE_BATCH_SIZE=${5:-4}
  LOGDIR=${6:-test_logdir}
  check_given TFDS_DATA_DIR "$TFDS_DATA_DIR"
  check_folder TFDS_DATA_DIR "$TFDS_DATA_DIR"
  check_given VOCAB_PATH "$VOCAB_PATH"
  check_path VOCAB_PATH "$VOCAB_PATH"
  check_precision PRECISION "$PREC"
  check_count NUM_GPUS "$NUM_GPUS"
  check_number PERCORE_BATCH_SIZE "$PERCORE_BATCH_SIZE"
  check_writable LOGDIR "$LOGDIR"
  check_python
  FLAGS=(
    --job_log_dir="$LOGDIR" --tfds_data_dir="$TFDS_DATA_DIR" --fdl.VOCAB_PATH="$VOCAB_PATH"
    --fdl.FPROP_DTYPE="$PREC" --fdl.PERCORE_BATCH_SIZE="$PERCORE_BATCH_SIZE"
    --fdl.ICI_MESH_SHAPE="[$NUM_GPUS,1,1]"
  )
}

pile_usage() {
  cat <<TEXT

  TFDS_DATA_DIR       folder of TFDS datasets; download_the_pile.py and download_lambada.py fill it
  VOCAB_PATH          SentencePiece model or tokenizer.json
  PRECISION           bfloat16, float32 or float16 (bfloat16)
  NUM_GPUS            GPUs of a node (8)
  PERCORE_BATCH_SIZE  rows of a batch a GPU; fractions are fine (4)
  LOGDIR              where checkpoints and metrics are (test_logdir)
  MORE_FLAGS          further ones of paxlite.main, such as --fdl.MAX_STEPS=100
TEXT
  environment_usage 0.85
}

environment_usage() {
  cat <<TEXT

Environment:
  PYTHON                          Python with paxlite (python3)
  BASE_XLA_FLAGS                  instead of this script's flags of XLA; may be empty
  XLA_FLAGS                       further flags of XLA
  XLA_PYTHON_CLIENT_MEM_FRACTION  part of a GPU's memory for JAX ($1)
  ENABLE_TE, ENABLE_FP8           1: Transformer Engine's products, in FP8 (docs/backends.md)
TEXT
}

# exec replaces the shell, so that Python gets the signals and its exit code is the script's.
exec_main() { exec "$PYTHON" -u -m paxlite.main "$@"; }
