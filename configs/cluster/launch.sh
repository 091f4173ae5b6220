#!/usr/bin/env bash
# Launch one job on several nodes. Run it on each node, from the checkout's root:
#
#   NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDR=node-0 configs/cluster/launch.sh CONFIG [section.key=value …]
#
# NODES            number of nodes
# NODE_RANK        number of this node, from 0; default under srun: SLURM_NODEID
# RANKS_PER_NODE   processes on each node, one per GPU
# MASTER_ADDR      name or address of node 0 for the other nodes
# MASTER_PORT      free port of node 0; default 29500
# INTERFACE        network interface to the other nodes, as `ip link` names it; default: NCCL searches for one, and gloo
#                  uses the interface of the node's own name, which may be the loopback
# PROGRAM          module that runs on each rank; default tost_lm.pretrain.commands.train
# OMP_NUM_THREADS  CPU threads per rank; default: the node's cores divided by its ranks
#
# The exit code is torchrun's, or 75 after a graceful stop: run the same command to resume.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

# require_integer NAME MIN MAX MEANING: fails unless the variable is an integer from MIN to MAX
require_integer() {
  local value="${!1}" problem="$1=${!1}: not an integer from $2 to $3"
  [[ -n "$value" ]] || problem="$1 is not set"
  [[ "$value" =~ ^(0|[1-9][0-9]{0,5})$ ]] && ((value >= $2 && value <= $3)) ||
    fail "$problem; set it to the $4"
}

NODES="${NODES:-}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}" # differs between the tasks of one srun, so a batch script cannot export it
RANKS_PER_NODE="${RANKS_PER_NODE:-}"
MASTER_PORT="${MASTER_PORT:-29500}"
require_integer NODES 1 99999 "number of nodes"
require_integer NODE_RANK 0 $((NODES - 1)) "number of this node"
require_integer RANKS_PER_NODE 1 99999 "number of processes per node, one per GPU"
require_integer MASTER_PORT 1 65535 "number of a free port of node 0"
[[ -n "${MASTER_ADDR:-}" ]] || fail "MASTER_ADDR is not set; set it to the name or address of node 0"
command -v torchrun > /dev/null || fail "torchrun: not found; activate the environment: . .venv/bin/activate"

if [[ -n "${INTERFACE:-}" ]]; then
  [[ -e "/sys/class/net/$INTERFACE" ]] ||
    fail "INTERFACE=$INTERFACE: this node has no such network interface; choose one of $(cd /sys/class/net && echo *)"
  export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="=$INTERFACE" # NCCL treats a bare name as a prefix
fi

threads=$(($(nproc) / RANKS_PER_NODE))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# torchrun forwards TERM and USR1 to the ranks for a graceful stop. Its default kills them after 30 s.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
STOPPED_FILE="$(mktemp -u)" # the ranks create it after a graceful stop, since torchrun then exits with 1
export STOPPED_FILE
[[ -w "${STOPPED_FILE%/*}" ]] || fail "TMPDIR=${STOPPED_FILE%/*}: not a folder that can be written; set TMPDIR to one"

torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m "${PROGRAM:-tost_lm.pretrain.commands.train}" "$@" &
torchrun=$!
for name in TERM INT HUP USR1; do
  trap "kill -$name $torchrun 2> /dev/null || true" "$name"
done
while true; do
  code=0
  wait "$torchrun" || code=$?
  ((code > 128)) && kill -0 "$torchrun" 2> /dev/null || break # a signal ended the wait, not the end of torchrun
done
[[ -e "$STOPPED_FILE" ]] || exit "$code"
rm -f "$STOPPED_FILE"
exit 75
