#!/usr/bin/env bash
# Runners of a planned job on machines that are reached by ssh: examples/jobs/ssh.sh s3://library/jobs/docs host1 host2 …
#
# Each machine has refrain, the model and the credentials of the object store in its own environment (~/.ssh/environment, or a profile that
# non-interactive shells read). Ctrl-C stops all of them; each gives its shard back. A runner that dies is started again.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 JOB HOST..." >&2
    exit 2
fi
job=$1
shift

run_on() {
    local host=$1 index=$2 status
    while true; do
        status=0
        # A terminal there, so that the runner is told when the connection ends.
        ssh -tt "$host" "refrain job run --index $index --job $(printf %q "$job")" </dev/null || status=$?
        # Done, done with documents listed as failed, a wrong command line, stopped. Anything else may pass.
        case $status in 0 | 2 | 3 | 130) return "$status" ;; esac
        echo "$host: the runner ended with status $status, and is started again" >&2
        sleep 10
    done
}

index=0
runners=()
for host in "$@"; do
    run_on "$host" "$index" &
    runners+=($!)
    index=$((index + 1))
done
trap 'kill "${runners[@]}" 2>/dev/null || true' INT TERM

status=0
for runner in "${runners[@]}"; do
    wait "$runner" || status=$?
done
exit "$status"
