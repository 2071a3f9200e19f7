#!/usr/bin/env bash
# What a host of GPUs has to show. Writes what it found into a folder, and what failed at the end.
#
#   benchmarks/run_host.sh [FOLDER [PART ...]]          default: host_results, the first five parts
#
#   build, check, tests, stress    is it right here
#   ep          dispatch and combine for 2, 4 and 8 ranks, as many as there are GPUs, in one table
#   results     dispatch and combine on all GPUs, by SM count and by tokens: benchmarks/results
#   layer       whole layers of named shapes, both sizings
#   overlap     dispatch and combine beside matrix products
#   lm          examples/lm: each way and each overlap
#   nccl        the torch backend beside the NCCL way
#   nodes       the GPUs as nodes of their own
#   drop_in     what HybridEPBuffer adds
#   frameworks  the frameworks' own tests; needs FRAMEWORKS, see tools/framework_tests.sh
#
# The first five take under nine minutes, each of the others one to three.
#
# Environment: PYTHON, and to try the script on a small machine DEVICE=cpu RANKS="2" TOKENS HIDDEN
# SMS LM (arguments of examples.lm), and TESTS (arguments of pytest) and CALLS (of the stress).
# COMMIT names the code where there is no git.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-host_results}
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(build check tests stress ep)
python=${PYTHON:-python3}
device=${DEVICE:-auto}
commit=${COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=()

# step NAME SECONDS COMMAND...: the log goes into the folder, its last line and the time here.
step() {
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    if timeout -s INT "$limit" "$@" >"$out/$name.log" 2>&1; then ended=ok; else
        ended="FAILED ($?)"
        failed+=("$name")
    fi
    printf "%-18s %4d s  %s: %s\n" "$name" $((SECONDS - begin)) "$ended" "$(tail -n 1 "$out/$name.log")"
}

gpus=0
[ "$device" = cpu ] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
rank_counts=(${RANKS:-2 4 8})
all_ranks=$((gpus > 0 ? gpus : rank_counts[0]))
sizes=(${TOKENS:+--tokens "$TOKENS"} ${HIDDEN:+--hidden "$HIDDEN"})
shapes=("${sizes[@]}")
[ ${#sizes[@]} -gt 0 ] || shapes=(--shape deepseek-v3 qwen3-235b qwen3-30b mixtral)

bench() { # NAME SECONDS ARGUMENTS...: with a report and a chart
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m hybrid_ep bench --device "$device" --commit "$commit" "$@" \
        --json "$out/$name.json" --plot "$out/$name.png"
}

lm() { # NAME ARGUMENTS...
    # shellcheck disable=SC2086  # several arguments
    step "$1" 120 "$python" -m torch.distributed.run --standalone --nproc-per-node "$all_ranks" \
        -m examples.lm --steps 20 --log-every 5 --json "$out/$1.json" "${@:2}" ${LM:-}
}

for part in "${parts[@]}"; do
    case $part in
    build) step build 600 "$python" setup.py --quiet build_ext --inplace ;;
    check) step check 60 "$python" -m hybrid_ep check --device "$device" ;;
    tests) # shellcheck disable=SC2086  # several arguments
        [ "$gpus" -eq 0 ] || step tests 200 "$python" -m pytest -q --tb=short ${TESTS:--m nvlink} ;;
    stress)
        [ "$gpus" -eq 0 ] || step stress 60 env HYBRID_EP_STRESS_CALLS="${CALLS:-500}" \
            "$python" -m pytest -m nvlink tests/suite/test_stress.py -q
        ;;
    ep)
        for ranks in "${rank_counts[@]}"; do
            [ "$device" = cpu ] || [ "$ranks" -le "$gpus" ] || continue
            # shellcheck disable=SC2086  # several SM counts
            bench "ep$ranks" 60 --ranks "$ranks" --tokens "${TOKENS:-4096}" --hidden "${HIDDEN:-7168}" \
                --experts 256 --topk 8 --dtype bf16 fp8 --sms ${SMS:-8 16 24 32 48} --sizing exact \
                --no-backward --iters 10
        done
        "$python" benchmarks/summarise.py "$out" | tee "$out/summary.md"
        ;;
    results)
        bench results 150 --ranks "$all_ranks" "${sizes[@]}"
        bench results_tokens 150 --ranks "$all_ranks" --sweep tokens ${HIDDEN:+--hidden "$HIDDEN"}
        ;;
    layer)
        # shellcheck disable=SC2086  # several SM counts
        bench layer 200 --layer --ranks "$all_ranks" "${shapes[@]}" --sms ${SMS:-32 48} --sizing exact max_rows
        ;;
    overlap) # shellcheck disable=SC2086  # several SM counts
        bench overlap 150 --overlap --ranks "$all_ranks" "${sizes[@]}" --sms ${SMS:-8 16 24 48} ;;
    lm)
        lm lm_none --overlap none
        lm lm_shared --overlap shared
        lm lm_shared_room --overlap shared --room 1.25 --leave-free 32
        lm lm_halves_room --overlap halves --room 1.25 --leave-free 32
        lm lm_nccl --way nccl --overlap shared
        ;;
    nccl) step over_nccl 150 "$python" benchmarks/over_nccl.py --ranks "$all_ranks" --json "$out/over_nccl.json" ;;
    nodes) step nodes 150 "$python" benchmarks/nodes.py --ranks "$all_ranks" ;;
    drop_in) step drop_in 60 "$python" benchmarks/drop_in.py --ranks "$all_ranks" --json "$out/drop_in.json" ;;
    frameworks) step frameworks 300 env LOGS="$out" tools/framework_tests.sh ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
    esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
