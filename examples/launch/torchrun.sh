#!/bin/bash
# A fixed team by torchrun with its c10d rendezvous; on every machine, with the address of one of them:
#     NPROC=4 bash examples/launch/torchrun.sh 192.168.1.10:29500
#     NPROC=1 bash examples/launch/torchrun.sh 192.168.1.10:29500
# Machines may have different NPROC; all need the same NNODES. torchrun restarts all ranks when one fails,
# and then they resume from the newest checkpoint.
set -euo pipefail

endpoint=$1
shift
run=${RUN:-examples/pretrain_machines.yaml}
name=${NAME:-$(basename "$run" .yaml)}

# A shell of its own for each rank: after a restart there is a checkpoint to resume from.
rank='
resume=()
if compgen -G "runs/$NAME/checkpoints/step-*" >/dev/null; then resume=(--resume); fi
exec evener pretrain "$@" --name "$NAME" "${resume[@]}"
'
export NAME=$name
exec torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${ID:-$name}" ${TORCHRUN:-} \
    --no-python bash -c "$rank" rank "$run" "$@"
