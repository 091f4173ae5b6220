#!/usr/bin/env bash
# One job on several nodes: each of them runs this from the checkout's root.
#
#   NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDR=node-0 configs/cluster/launch.sh CONFIG [section.key=value …]
#
# NODES            how many nodes the job has
# NODE_RANK        which of them this one is, from 0; under srun SLURM_NODEID, when it is not set
# RANKS_PER_NODE   processes on each node: one for each of its GPUs
# MASTER_ADDR      name or address of node 0, as the other nodes reach it
# MASTER_PORT      a port of node 0 that is free; 29500 when it is not set
# INTERFACE        the network interface towards the other nodes, as `ip link` names it; when it is not set, NCCL looks
#                  for one, and gloo takes the one that the node's own name leads to, which may be the loopback
# PROGRAM          a program of the pretrain folder; pretrain.train when it is not set
# OMP_NUM_THREADS  CPU threads of a rank; the node's cores shared out evenly when it is not set
#
# It ends as torchrun does, and with 75 when training left early with everything saved: start it again.
set -euo pipefail

refuse() {
  echo "error: $1" >&2
  exit 2
}

# number NAME LEAST MOST MEANING: refuses unless the variable holds a whole number between them
number() {
  local value="${!1}" found="$1=${!1}"
  [[ -n "$value" ]] || found="$1 is not set"
  [[ "$value" =~ ^(0|[1-9][0-9]{0,5})$ ]] && ((value >= $2 && value <= $3)) ||
    refuse "$found: give $4, a whole number from $2 to $3"
}

NODES="${NODES:-}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}" # differs between the tasks of one srun, so no batch script can export it
RANKS_PER_NODE="${RANKS_PER_NODE:-}"
MASTER_PORT="${MASTER_PORT:-29500}"
number NODES 1 99999 "how many nodes the job has"
number NODE_RANK 0 $((NODES - 1)) "which of the $NODES nodes this one is"
number RANKS_PER_NODE 1 99999 "how many processes each node runs, one for each of its GPUs"
number MASTER_PORT 1 65535 "a port of node 0 that is free"
[[ -n "${MASTER_ADDR:-}" ]] || refuse "MASTER_ADDR is not set: give the name or address of node 0"
command -v torchrun > /dev/null || refuse "torchrun: not found; activate the environment: . .venv/bin/activate"

if [[ -n "${INTERFACE:-}" ]]; then
  [[ -e "/sys/class/net/$INTERFACE" ]] ||
    refuse "INTERFACE=$INTERFACE: this node has no such network interface; it has $(cd /sys/class/net && echo *)"
  export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="=$INTERFACE" # to NCCL a bare name is a prefix
fi

threads=$(($(nproc) / RANKS_PER_NODE))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# TERM and USR1 reach the ranks, which save and leave; torchrun would kill them half a minute later.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
LEFT_FILE="$(mktemp -u)" # the ranks make it when they leave with everything saved; torchrun ends with 1 however they do
export LEFT_FILE

torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m "${PROGRAM:-pretrain.train}" "$@" &
torchrun=$!
for name in TERM INT HUP USR1; do
  trap "kill -$name $torchrun 2> /dev/null || true" "$name"
done
while true; do
  code=0
  wait "$torchrun" || code=$?
  ((code > 128)) && kill -0 "$torchrun" 2> /dev/null || break # a signal ended the wait, not torchrun
done
[[ -e "$LEFT_FILE" ]] || exit "$code"
rm -f "$LEFT_FILE"
exit 75
