#!/bin/bash
# An elastic team over plain SSH: the coordinator here, and `evener join` on each box.
#     bash examples/launch/ssh.sh 192.168.1.10:29600 big:4 old:2 laptop:1
# The first argument is an address of this machine that all boxes reach; the others are boxes with the
# number of workers to start there. Each box has evener, and run.yaml with its data in ~/work; its output
# goes to join.log there. Ctrl-C lets all workers leave, and the last ones save a checkpoint. For a box that
# comes later, or was restarted, give the command again for that box alone: the coordinator runs already.
set -uo pipefail

address=$1
shift
[[ -e token ]] || (umask 077; openssl rand -hex 32 >token)

evener coordinator 1:64 --bind "$address" --token-file token --ledger ledger.json &
coordinator=$!

joins=()
for box in "$@"; do
    ssh "${box%:*}" 'umask 077; mkdir -p work; cat >work/token' <token
    ssh "${box%:*}" "cd work && echo \$\$ >join.pid && exec evener join $address --token-file token \
        --nproc ${box##*:} run.yaml >>join.log 2>&1" </dev/null &
    joins+=($!)
done

leave() {
    for box in "$@"; do
        ssh "${box%:*}" 'kill "$(cat work/join.pid)"' </dev/null &
    done
}
trap 'leave "$@"' INT TERM

code=0
for join in "${joins[@]}"; do
    # A signal interrupts `wait`, which then is called again.
    while wait "$join"; last=$?; kill -0 "$join" 2>/dev/null; do :; done
    ((last == 0)) || code=$last
done
kill "$coordinator" 2>/dev/null
exit "$code"
