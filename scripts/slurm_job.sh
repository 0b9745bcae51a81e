# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts that source this file use its variables
# Sourced by the batch scripts in this folder. Runs a step with one task per GPU. Saves and requeues
# the job before its time is over. Also requeues it after the loss of a task.
#
# Environment:
#   BASE_WORKSPACE_DIR  absolute path; all output is written below it (required)
#   LOG_DIR_LOCAL       folder below it for checkpoints and metrics (logs)
#   OUTPUT_DIR          folder below it for the output of the tasks (output)
#   GPUS_PER_NODE       number of tasks per node (8)
#   PREC                bfloat16, float32 or float16 (bfloat16)
#   ADDITIONAL_ARGS     flags of paxlite.main, separated by blanks
#   BASE_SCRIPT         another script to run, below BASE_WORKSPACE_DIR, with the same arguments
#   CONTAINER           an image for pyxis; without it:
#   VENV                an environment: its bin comes first on PATH, and its Python is PYTHON
#   PAXLITE_DIR         paxlite's checkout (the folder where sbatch was called; in a container
#                       /opt/paxlite)
#   ENABLE_TE, ENABLE_FP8, PERCORE_BATCH_SIZE, PYTHON, BASE_XLA_FLAGS, XLA_FLAGS
#                       as in the scripts in paxlite/contrib/gpu/scripts_gpu

SAVED=75       # paxlite's exit code for "saved: start me again"
MAX_RESTARTS=3 # restarts in a row without a newer checkpoint

SIGNAL=''      # USR1 when the time is nearly over, TERM when Slurm ends the job
INTERRUPTED='' # not empty after a signal, until it is emptied again
SRUN=''        # the process id of srun

# fail WHAT WHERE WAY_OUT
fail() {
  printf 'error: %s; %s; %s\n' "$1" "$2" "$3" >&2
  exit 2
}

say() { printf '[%(%F %T)T restart %s] %s\n' -1 "${SLURM_RESTART_COUNT:-0}" "$*"; }

# check_match NAME VALUE PATTERN WAY_OUT
check_match() {
  [[ $2 =~ ^($3)$ ]] || fail "$1='$2' is not possible" 'the environment of sbatch' "$4"
}

# check_place NAME VALUE: checks for characters with a meaning in Slurm's patterns or pyxis' mounts.
check_place() {
  check_match "$1" "$2" '/[^%\\,:]*' 'give an absolute path without % \ , and :'
  [[ -e $2 ]] || fail "$1='$2' does not exist" "on $(hostname)" 'give a path that all nodes share'
}

# require NAME WHAT
require() {
  [[ -n ${!1:-} ]] || fail "$1 is missing" 'the environment of sbatch' "give $2"
}

# Checks the environment before anything is written; sets PAXLITE_DIR, SCRIPTS, LOG_DIR and MOUNTS.
prepare_job() {
  local name below='[^/%\\,:][^%\\,:]*'
  [[ -n ${SLURM_JOB_ID:-} ]] || fail 'this is not a job' "$0" "submit it: sbatch … $0"
  require BASE_WORKSPACE_DIR 'an absolute path'
  check_place BASE_WORKSPACE_DIR "$BASE_WORKSPACE_DIR"
  LOG_DIR_LOCAL=${LOG_DIR_LOCAL:-logs}
  OUTPUT_DIR=${OUTPUT_DIR:-output}
  GPUS_PER_NODE=${GPUS_PER_NODE:-8}
  PREC=${PREC:-bfloat16}
  ADDITIONAL_ARGS=${ADDITIONAL_ARGS:-}
  for name in LOG_DIR_LOCAL OUTPUT_DIR; do
    check_match "$name" "${!name}" "$below" 'give a path below BASE_WORKSPACE_DIR'
    [[ /${!name}/ != */../* ]] ||
      fail "$name='${!name}' leads elsewhere" 'the environment of sbatch' 'leave .. out'
  done
  check_match GPUS_PER_NODE "$GPUS_PER_NODE" '[1-9][0-9]{0,2}' 'give a number'
  check_match PREC "$PREC" 'bfloat16|float32|float16' 'give bfloat16, float32 or float16'
  for name in ENABLE_TE ENABLE_FP8; do
    check_match "$name" "${!name:-0}" '[01]' 'give 0 or 1'
  done
  LOG_DIR=$BASE_WORKSPACE_DIR/$LOG_DIR_LOCAL
  MOUNTS=$BASE_WORKSPACE_DIR:$BASE_WORKSPACE_DIR
  if [[ -n ${CONTAINER:-} ]]; then
    PAXLITE_DIR=${PAXLITE_DIR:-/opt/paxlite}
  else
    PAXLITE_DIR=${PAXLITE_DIR:-$SLURM_SUBMIT_DIR}
    if [[ -n ${VENV:-} ]]; then
      [[ -x $VENV/bin/python3 ]] ||
        fail "VENV='$VENV' holds no bin/python3" "on $(hostname)" 'give an environment with paxlite'
      export PATH=$VENV/bin:$PATH PYTHON=$VENV/bin/python3
    fi
  fi
  SCRIPTS=$PAXLITE_DIR/paxlite/contrib/gpu/scripts_gpu
}

# share NAME VALUE: mounts a path into the container under the same name; none and None are no path.
share() {
  if [[ -z $2 || ${2,,} == none ]]; then return; fi
  check_place "$1" "$2"
  MOUNTS+=,$2:$2
}

# run_job SCRIPT ARGUMENT…: runs SCRIPT, or BASE_SCRIPT if given, in every task; does not return.
run_job() {
  local script=$1 output=$BASE_WORKSPACE_DIR/$OUTPUT_DIR code
  shift
  if [[ -n ${BASE_SCRIPT:-} ]]; then script=$BASE_WORKSPACE_DIR/$BASE_SCRIPT; fi
  if [[ -z ${CONTAINER:-} || -n ${BASE_SCRIPT:-} ]]; then
    [[ -r $script ]] ||
      fail "$script is not there" "on $(hostname)" 'PAXLITE_DIR is a checkout, BASE_SCRIPT a script'
  fi
  mkdir -p -- "$LOG_DIR" "$output" || fail "$output cannot be made" "on $(hostname)" 'see above'
  # A newly submitted job counts its restarts from zero.
  if ((${SLURM_RESTART_COUNT:-0} == 0)); then rm -f -- "$LOG_DIR/restarts"; fi

  # Who does not know it cannot take the place of a task (docs/reliability.md).
  export PAXLITE_TOKEN=${PAXLITE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
  local step=(
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))"
    --ntasks-per-node="$GPUS_PER_NODE" --overcommit
    # An error of the user ends all tasks with its own exit code. A lost task ends the others with
    # 75. Tasks that wait for one that never began are ended after a minute.
    --kill-on-bad-exit=0 --wait=60
    --export=ALL
    --output="$output/output-%j-%n-%t.txt" --error="$output/output-%j-%n-%t.txt"
    --open-mode=append # a requeued job has the same number
  )
  if [[ -n ${CONTAINER:-} ]]; then
    step+=(--container-image="$CONTAINER" --container-mounts="$MOUNTS")
    step+=(--container-env="$(container_env)")
  fi

  if [[ -n $SIGNAL ]]; then decide "$SAVED"; fi # the time is over before anything has begun
  say "runs $script in $SLURM_JOB_NUM_NODES × $GPUS_PER_NODE tasks; they print into $output"
  "${step[@]}" bash "$script" "$@" &
  SRUN=$!
  if [[ $SIGNAL == USR1 ]]; then tell_step; fi # the signal came before SRUN was known
  while true; do
    INTERRUPTED=''
    code=0
    wait "$SRUN" || code=$?
    [[ -n $INTERRUPTED ]] || break # a signal ends the wait, but not the step
  done
  decide "$code"
}

# Prints the variables that keep this environment's values although the image sets them too.
container_env() {
  local name names=()
  for name in BASE_XLA_FLAGS XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION ENABLE_TE ENABLE_FP8 \
    NVTE_FUSED_ATTN PERCORE_BATCH_SIZE PYTHON; do
    if [[ -n ${!name:-} ]]; then names+=("$name"); fi
  done
  local IFS=,
  printf '%s' "${names[*]}"
}

# Slurm sends USR1 only to the batch script; this passes it on to the tasks as TERM. Slurm itself
# sends TERM to the tasks when it requeues or cancels the job.
on_signal() {
  INTERRUPTED=1
  say "got $1"
  if [[ $SIGNAL != TERM ]]; then SIGNAL=$1; fi
  if [[ $1 == USR1 && -n $SRUN ]]; then tell_step; fi
}

# Without a step, scancel has no effect and reports no error, so this waits for the step. A task
# that is only starting dies from TERM, and counts as lost.
tell_step() {
  while kill -0 "$SRUN" 2>/dev/null; do
    if squeue -h -s -j "$SLURM_JOB_ID" -o %i | grep -qx "$SLURM_JOB_ID\.0"; then
      scancel --signal=TERM "$SLURM_JOB_ID.0"
      return 0 # in a trap, a plain return gives the status of the interrupted command
    fi
    sleep 0.5
  done
}

# decide CODE: requeues the job or not, prints the decision, and exits.
#
# srun's exit code is the highest of its tasks. 75 means that all tasks have saved. A code above 128
# means that a signal killed a task: its node or GPU failed, memory ran out, or srun ended it
# because it waited for a task that never began. A crash that would happen again looks the same, so
# both are requeued, and a job without progress is stopped. Any other code needs the user.
decide() {
  local code=$1 count
  trap '' USR1 TERM
  if [[ $SIGNAL == TERM ]]; then
    # Only Slurm knows if it requeues, preempts or cancels. A canceled job must stay canceled.
    say "the step ended with $code after TERM; Slurm decides what becomes of the job"
  elif ((code == 0)); then
    rm -f -- "$LOG_DIR/restarts"
    say 'complete'
  elif ((code != SAVED && code <= 128)); then
    say "failed with $code: not requeued; see the output of the tasks"
  else
    count=$(count_restart)
    if ((count > MAX_RESTARTS)); then
      say "stopped with $code: $MAX_RESTARTS restarts in a row without a newer checkpoint"
    else # printed first, because Slurm ends this script soon
      say "requeued after exit code $code: restart $count from this checkpoint"
      scontrol requeue "$SLURM_JOB_ID" || say 'it is requeued already, or must not be'
    fi
  fi
  exit "$code"
}

# Records this restart in LOG_DIR, and prints the number of restarts from the same checkpoint.
count_restart() {
  local newest count=0 before=''
  newest=$(find "$LOG_DIR" -regextype posix-extended -type d -regex '.*/checkpoint_[0-9]+' \
    -printf '%T@ %P\n' -prune | sort -n | tail -n 1)
  if [[ -f $LOG_DIR/restarts ]]; then read -r count before <"$LOG_DIR/restarts"; fi
  if [[ $newest != "$before" || ! $count =~ ^[0-9]+$ ]]; then count=0; fi
  count=$((count + 1))
  printf '%s %s\n' "$count" "$newest" >"$LOG_DIR/restarts"
  printf '%s' "$count"
}

# Signals may come before there is a step. Without traps they would end this script.
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
