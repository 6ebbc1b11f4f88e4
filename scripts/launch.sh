#!/usr/bin/env bash
# Train on several devices, or several machines, as one job:
#
#   NPROC_PER_NODE=2 scripts/launch.sh DATA [flags of fairseq-train]
#
# NPROC_PER_NODE  processes on this machine (default: its GPUs, or 1 without any)
# NNODES          machines (default 1);  NODE_RANK  number of this machine, from 0
# MASTER_ADDR     host name of machine 0, needed when NNODES > 1;  MASTER_PORT  a free port there (default 29500)
#
# GPUs are used where there are some (nccl), unless --cpu is among the flags; else the processes share the CPUs (gloo).
# On several machines start the same command on each of them, with its own NODE_RANK; or let Slurm do it, one task a
# machine, with nothing else to set:
#
#   sbatch --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --wrap "srun scripts/launch.sh DATA --save-dir DIR ..."
#
# One job at a time writes into a save-dir: it holds a lock on SAVE_DIR/launch.lock. Killed and started again, a job
# resumes from checkpoint_last.pt. What would start independent jobs side by side is refused; docs/distributed.md.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "launch.sh: error: $*" >&2
    exit 1
}

usage() {
    sed -n '2,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

require_number() { # NAME VALUE SMALLEST
    [[ "$2" =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || fail "$1 is '$2': give a whole number from $3 on"
}

case "${1:-}" in
-h | --help) usage && exit 0 ;;
"" | -*) fail "the first argument is the data folder: NPROC_PER_NODE=2 scripts/launch.sh DATA [flags of fairseq-train]" ;;
esac

for name in RANK LOCAL_RANK TORCHELASTIC_RUN_ID; do
    [ -z "${!name:-}" ] || fail "$name is set, so this runs inside torchrun or another launcher, and every process" \
        "would start a job of its own: start launch.sh directly, once on each machine"
done

data="$1"
save_dir="checkpoints"
restore_file=""
on_cpu=""
user_dir="$root/fairseq_collab"
previous=""
for argument in "$@"; do
    case "$argument" in
    --distributed-* | --device-id | --device-id=* | --nprocs-per-node*)
        fail "${argument%%=*} is set by launch.sh: leave it out and set NPROC_PER_NODE, NNODES, NODE_RANK," \
            "MASTER_ADDR and MASTER_PORT" ;;
    --cpu) on_cpu=yes ;;
    --save-dir=*) save_dir="${argument#*=}" ;;
    --restore-file=*) restore_file="${argument#*=}" ;;
    --user-dir=*) user_dir="" ;;
    --user-dir) user_dir="" ;;
    esac
    case "$previous" in
    --save-dir) save_dir="$argument" ;;
    --restore-file) restore_file="$argument" ;;
    esac
    previous="$argument"
done

if [ -n "${SLURM_STEP_ID:-}" ]; then
    tasks="${SLURM_STEP_NUM_TASKS:-1}" nodes="${SLURM_STEP_NUM_NODES:-1}"
    [ "$tasks" -eq "$nodes" ] || fail "srun started $tasks tasks on $nodes machines, and each would start" \
        "processes of its own: give srun --ntasks-per-node=1"
    NNODES="${NNODES:-$nodes}"
    NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"
    if [ "$NNODES" -gt 1 ]; then
        first="$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}" 2>/dev/null | head -n 1)" || true
        MASTER_ADDR="${MASTER_ADDR:-$first}"
        MASTER_PORT="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 20000))}"
    fi
elif [ -z "${NNODES:-}" ] && [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
    fail "this Slurm job has $SLURM_JOB_NUM_NODES machines and launch.sh runs on one of them: start it with srun," \
        "or set NNODES=1"
fi

NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
require_number NNODES "$NNODES" 1
require_number NODE_RANK "$NODE_RANK" 0
[ -z "${NPROC_PER_NODE:-}" ] || require_number NPROC_PER_NODE "$NPROC_PER_NODE" 1
[ -z "${MASTER_PORT:-}" ] || require_number MASTER_PORT "$MASTER_PORT" 1
[ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK, but with NNODES=$NNODES the last one is $((NNODES - 1))"
[ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] ||
    fail "NNODES=$NNODES needs MASTER_ADDR, the host name of machine 0, or every machine would train on its own"

IFS=: read -r -a folders <<<"$data"
for folder in "${folders[@]}"; do
    [ -d "$folder" ] || fail "there is no data folder $folder: make it with fairseq-preprocess"
done
compgen -G "${folders[0]}/dict*.txt" >/dev/null || fail "data folder ${folders[0]} has no dictionary" \
    "(dict.LANG.txt or dict.txt): give a folder that fairseq-preprocess wrote"
if [ -z "$restore_file" ] || [ "$restore_file" = checkpoint_last.pt ]; then
    restore_file="$save_dir/checkpoint_last.pt"
elif [ ! -f "$restore_file" ]; then
    fail "there is no checkpoint $restore_file, and training would silently begin anew: correct --restore-file"
fi

if [ -x "$root/.venv/bin/python" ]; then
    python="$root/.venv/bin/python"
else
    python="$(command -v python3 || command -v python)" || fail "there is no Python: run scripts/setup_env.sh"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Prints the number of GPUs; ends with a sentence when something is missing or the checkpoint is damaged.
devices="$("$python" - "$restore_file" <<'PYTHON'
import importlib.util
import sys


def fail(sentence):
    sys.exit(f"launch.sh: error: {sentence}")


try:
    import torch

    from fairseq_collab.checkpoint_files import CollabError, require_readable
except ImportError as error:
    fail(f"{sys.executable} cannot import what training needs ({error}): run scripts/setup_env.sh")
if importlib.util.find_spec("fairseq") is None:
    fail(f"{sys.executable} has no fairseq: run scripts/setup_env.sh")
try:
    require_readable(sys.argv[1])
except CollabError as error:
    fail(error)
print(torch.cuda.device_count())
PYTHON
)" || exit 1

[ "$devices" -gt 0 ] || on_cpu=yes
if [ -n "$on_cpu" ]; then
    backend=(--distributed-backend gloo --cpu --ddp-backend legacy_ddp)
    NPROC_PER_NODE="${NPROC_PER_NODE:-1}"
else
    backend=(--distributed-backend nccl)
    NPROC_PER_NODE="${NPROC_PER_NODE:-$devices}"
    [ "$NPROC_PER_NODE" -le "$devices" ] ||
        fail "NPROC_PER_NODE=$NPROC_PER_NODE, but this machine has $devices GPU(s): give at most $devices, or --cpu"
fi

if [ "$NODE_RANK" -eq 0 ]; then
    mkdir -p "$save_dir" || fail "the save-dir $save_dir cannot be made"
    command -v flock >/dev/null || fail "the command flock is missing (package util-linux): it keeps two jobs apart"
    exec 9>>"$save_dir/launch.lock" || fail "the save-dir $save_dir cannot be written to"
    flock --nonblock 9 || fail "another job is writing into $save_dir ($(tail -n 1 "$save_dir/launch.lock")):" \
        "wait for its end, stop it, or give another --save-dir"
    echo "process $$ on $(hostname)" >"$save_dir/launch.lock"
fi

if [ "$NNODES" -eq 1 ] && [ -z "${MASTER_PORT:-}" ]; then
    rendezvous=(--standalone)
else
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "${MASTER_ADDR:-127.0.0.1}"
        --master-port "${MASTER_PORT:-29500}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset MASTER_ADDR MASTER_PORT
flags=("${backend[@]}")
[ -z "$user_dir" ] || flags+=(--user-dir "$user_dir")
echo "launch.sh: $((NNODES * NPROC_PER_NODE)) processes, $NPROC_PER_NODE of them here," \
    "$([ -n "$on_cpu" ] && echo "on CPUs" || echo "on GPUs")"

# shellcheck disable=SC2016  # the variables are those that torchrun gives to each process
exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$NPROC_PER_NODE" --no-python \
    bash -c 'exec "$@" --distributed-world-size "$WORLD_SIZE" --distributed-rank "$RANK" --device-id "$LOCAL_RANK"' \
    fairseq-train "$python" -m fairseq_cli.train "$data" "${flags[@]}" "${@:2}" \
    --distributed-init-method env:// --distributed-no-spawn
