#!/usr/bin/env bash
# All tests that need a GPU, in groups; one line of results for each. Needs pytest-xdist.
#
#   tools/gpu_tests.sh one [group ...]    with one visible GPU
#   tools/gpu_tests.sh two [group ...]    with two
#
# Groups, in their order (all of them unless some are named):
#
#   shared     what can share a GPU, on several workers
#   exclusive  what reads a GPU's free memory or depends on the load: one test after the other
#   memcheck   compute-sanitizer over two ranks of `hybrid-ep check`; only where it is named
#
# Environment: CUDA_VISIBLE_DEVICES (its first one or two are used), LOGS (build/gpu_tests), WORKERS (5),
# LIMIT (480: seconds for a group, which then ends and says what it has),
# COREDUMPS=1 (a small core in LOGS names the kernel of an illegal access: cuda-gdb, "target cudacore"),
# MPS=1 (an MPS daemon lets ranks that share a GPU run at once; what kills ranks then runs without it,
# as the group `breaking`), and PYTEST (more arguments, such as "-k handles").
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

visible=$(tr ',' ' ' <<<"${CUDA_VISIBLE_DEVICES:-0,1}")
case ${1:-} in
one) CUDA_VISIBLE_DEVICES=$(cut -d' ' -f1 <<<"$visible") ;;
two) CUDA_VISIBLE_DEVICES=$(cut -d' ' -f1,2 <<<"$visible" | tr ' ' ',') ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
export CUDA_VISIBLE_DEVICES
# the oracle of each worker would take all cores, and its idle threads poll
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mode=$1
shift
mps=${MPS:-}
groups=("$@")
[ $# -gt 0 ] || groups=(shared ${mps:+breaking} exclusive)

logs=${LOGS:-build/gpu_tests}/$mode
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
if [ -n "${COREDUMPS:-}" ]; then
    export CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_ENABLE_LIGHTWEIGHT_COREDUMP=1
    export CUDA_COREDUMP_FILE=$logs/core.%p
fi
workers=(-n "${WORKERS:-5}" --dist worksteal)
failed=0

report() { # name, seconds at its start, its exit code, what is to say
    echo "$1: rc $3, $((SECONDS - $2)) s, $4"
    [ "$3" -eq 0 ] || failed=1
}

pytest_group() { # name, pytest's arguments
    local name=$1 start=$SECONDS log=$logs/$1.log
    shift
    # shellcheck disable=SC2086
    timeout --signal=INT "${LIMIT:-480}" python3 -m pytest -v -ra -p no:cacheprovider --durations=60 \
        "$@" ${PYTEST:-} >"$log" 2>&1
    report "$name" "$start" $? "$(tail -1 "$log")"
    grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-200
}

start_mps() {
    export CUDA_MPS_PIPE_DIRECTORY=$logs/mps CUDA_MPS_LOG_DIRECTORY=$logs/mps_log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d
}

stop_mps() {
    echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

for group in "${groups[@]}"; do
    case $group in
    shared)
        if [ -n "$mps" ]; then
            start_mps
            pytest_group shared -m "gpu and not exclusive and not breaks_ranks" "${workers[@]}"
            stop_mps
        else
            pytest_group shared -m "gpu and not exclusive" "${workers[@]}"
        fi
        ;;
    breaking) pytest_group breaking -m "gpu and not exclusive and breaks_ranks" "${workers[@]}" ;;
    exclusive) pytest_group exclusive -m "gpu and exclusive" ;;
    memcheck)
        start=$SECONDS
        compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 \
            python3 -m hybrid_ep check --ranks 2 --backend nvlink >"$logs/memcheck.log" 2>&1
        report memcheck "$start" $? "$(tail -3 "$logs/memcheck.log" | grep passed)"
        ;;
    *)
        echo "no such group: $group" >&2
        exit 2
        ;;
    esac
done
echo "all: $SECONDS s"
exit $failed
