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
# TERM, INT, HUP, QUIT and USR1 are forwarded to the ranks, which may save as long as they need. The exit code is theirs:
# 75 after a graceful stop. Run the same command to resume.
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
python -P -c "import tost_lm" 2> /dev/null ||
  fail "python: not found, or without tost_lm; activate the environment: . .venv/bin/activate"

if [[ -n "${INTERFACE:-}" ]]; then
  [[ -e "/sys/class/net/$INTERFACE" ]] ||
    fail "INTERFACE=$INTERFACE: this node has no such network interface; choose one of $(cd /sys/class/net && echo *)"
  export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="=$INTERFACE" # NCCL treats a bare name as a prefix
fi

export NODES NODE_RANK RANKS_PER_NODE MASTER_ADDR MASTER_PORT
exec python -P -m tost_lm.parallel.launch "${PROGRAM:-tost_lm.pretrain.commands.train}" "$@"
