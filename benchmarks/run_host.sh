#!/usr/bin/env bash
# What a host of GPUs has to show, in under nine minutes: builds, checks, tests, a short stress, and
# the bench for 2, 4 and 8 ranks, as many as there are GPUs. Writes what it found into a folder.
#
#   benchmarks/run_host.sh [FOLDER]          default: host_results
#
# Environment: PYTHON, and to try the script on a small machine DEVICE=cpu RANKS="2" TOKENS HIDDEN
# SMS, and TESTS (arguments of pytest) and CALLS (of the stress). COMMIT names the code where there
# is no git.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-host_results}
python=${PYTHON:-python3}
device=${DEVICE:-auto}
commit=${COMMIT:-$(git describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
mkdir -p "$out"
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
    printf "%-10s %4d s  %s: %s\n" "$name" $((SECONDS - begin)) "$ended" "$(tail -n 1 "$out/$name.log")"
}

gpus=0
[ "$device" = cpu ] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
step build 90 "$python" setup.py --quiet build_ext --inplace
step check 60 "$python" -m hybrid_ep check --device "$device"
if [ "$gpus" -gt 0 ]; then
    # shellcheck disable=SC2086  # several arguments
    step tests 200 "$python" -m pytest -q --tb=short ${TESTS:--m nvlink}
    step stress 60 env HYBRID_EP_STRESS_CALLS="${CALLS:-500}" "$python" -m pytest -m nvlink tests/suite/test_stress.py -q
fi
for ranks in ${RANKS:-2 4 8}; do
    [ "$device" = cpu ] || [ "$ranks" -le "$gpus" ] || continue
    step "ep$ranks" 60 "$python" -m hybrid_ep bench --ranks "$ranks" --device "$device" --commit "$commit" \
        --tokens "${TOKENS:-4096}" --hidden "${HIDDEN:-7168}" --experts 256 --topk 8 --dtype bf16 fp8 \
        --sms ${SMS:-8 16 24 32 48} --sizing exact --no-backward --iters 10 \
        --json "$out/ep$ranks.json" --plot "$out/ep$ranks.png"
done
"$python" benchmarks/summarise.py "$out" | tee "$out/summary.md"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
