#!/usr/bin/env bash
# The whole GPU suite in groups, one line of results for each; needs pytest-xdist.
#
#   tools/gpu_tests.sh one    each test with one visible GPU; a second GPU, if there is one, takes half of the groups
#   tools/gpu_tests.sh two    with two visible GPUs, memcheck beside them
#
# Ranks that share a GPU take turns, so more workers than these make it slower. Tests that read a GPU's free memory run alone.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${LOGS:-build/gpu_tests}
mkdir -p "$logs"

group() { # name, pytest's arguments
    local name=$1 start=$SECONDS
    shift
    python3 -m pytest -q -ra -p no:cacheprovider "$@" >"$logs/$name.log" 2>&1
    local rc=$?
    echo "$name: rc $rc, $((SECONDS - start)) s, $(tail -1 "$logs/$name.log")"
    grep -E '^(FAILED|ERROR) ' "$logs/$name.log" | cut -c1-200
    return $rc
}
alone="tests/gpu/test_memory.py tests/gpu/test_conditions.py"
without_alone="--ignore tests/gpu/test_memory.py --ignore tests/gpu/test_conditions.py"
many="4x1 or 3x2 or 2x4" # shapes of several nodes with most ranks

nvlink() {
    export CUDA_VISIBLE_DEVICES=$1
    group nvlink_alone $alone
    group nvlink tests/gpu $without_alone -n 5
    group nvshmem_many_ranks tests/nvshmem/test_verbs.py -n 4 -k "$many"
}
nvshmem() {
    export CUDA_VISIBLE_DEVICES=$1
    group nvshmem_faults tests/nvshmem/test_faults.py tests/nvshmem/test_conditions.py -n 3
    group nvshmem tests/nvshmem -n 5 --ignore tests/nvshmem/test_faults.py \
        --ignore tests/nvshmem/test_conditions.py -k "not (test_verbs and ($many))"
}

case ${1:-} in
one)
    if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
        nvlink 0 &
        nvshmem 1 &
        wait
    else
        nvlink 0
        nvshmem 0
    fi
    ;;
two)
    export CUDA_VISIBLE_DEVICES=0,1
    group two_gpus_alone $alone
    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 \
        python3 -m hybrid_ep check --ranks 2 --backend nvlink >"$logs/memcheck.log" 2>&1
    echo "memcheck: rc $?, $(grep -c 'ERROR SUMMARY: 0 errors' "$logs/memcheck.log") clean, $(tail -3 "$logs/memcheck.log" | grep passed)"
    group two_gpus_nvlink tests/gpu $without_alone -n 5
    group two_gpus_nvshmem tests/nvshmem -n 5
    ;;
*)
    echo "usage: tools/gpu_tests.sh one|two" >&2
    exit 2
    ;;
esac
