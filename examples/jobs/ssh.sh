#!/usr/bin/env bash
# Runners of a planned job on machines that are reached by ssh: examples/jobs/ssh.sh s3://library/jobs/docs host1 host2 …
#
# Each machine has refrain, the model, and the credentials of the object store in the environment of commands that ssh runs. Ctrl-C stops all
# runners, and each gives its shard back; so does one whose connection breaks. A runner that dies is started again.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 JOB HOST..." >&2
    exit 2
fi
job=$1
shift

# The runner of an index, stopped when the connection's input ends.
command_of() {
    printf 'exec 3<&0; refrain job run --index %q --job %q </dev/null & runner=$!\n' "$1" "$job"
    # shellcheck disable=SC2016 # expanded there
    printf '%s\n' '{ cat <&3; kill "$runner"; } >/dev/null 2>&1 & watch=$!' \
        'status=0; wait "$runner" || status=$?; kill "$watch" 2>/dev/null; exit "$status"'
}

run_on() {
    local host=$1 index=$2 command status ssh=
    trap 'kill "$ssh"; exit 130' TERM
    while true; do
        command=$(command_of "$index")
        # shellcheck disable=SC2029 # it is made here
        ssh "$host" "$command" <&4 &
        ssh=$! status=0
        wait "$ssh" || status=$?
        # Done, a wrong command line, done with documents listed as failed, another program, model or shards than were planned, stopped.
        # Anything else may pass.
        case $status in 0 | 2 | 3 | 4 | 130) return "$status" ;; esac
        echo "$host: the runner ended with status $status, and is started again" >&2
        sleep "${PAUSE:-10}" &
        wait $!
    done
}

# An input that never ends while this script runs.
pipe=$(mktemp -u)
mkfifo "$pipe"
exec 4<>"$pipe"
rm "$pipe"

index=0
runners=()
for host in "$@"; do
    run_on "$host" "$index" &
    runners+=($!)
    index=$((index + 1))
done
trap 'kill "${runners[@]}" 2>/dev/null' INT TERM

result=0
for runner in "${runners[@]}"; do
    status=0
    # A signal ends the first wait, and not the runner.
    wait "$runner" || wait "$runner" || status=$?
    [ "$status" -eq 0 ] || result=$status
done
exit "$result"
