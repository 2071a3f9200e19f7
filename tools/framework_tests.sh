#!/usr/bin/env bash
# The frameworks' own tests, as they are, with hybrid_ep in the place of DeepEP, on the visible GPUs;
# one line of results for each.
#
#   FRAMEWORKS=folder tools/framework_tests.sh [name ...]
#
# The folder, of which nothing is copied here:
#
#   deepep         DeepEP, branch hybrid-ep
#   megatron-lm    Megatron-LM, of the version of Megatron-Core: its pyproject.toml and tests
#   megatron-core  the unpacked wheel of Megatron-Core; not needed where megatron-lm is a whole checkout
#
# python3 needs torch, triton, numpy and pytest, and for Megatron-LM Python 3.12. Names, in their order
# (all unless some are named):
#
#   deep_ep    DeepEP's tests/test_hybrid_ep.py
#   graphs     DeepEP's tests/test_graphed_hybrid_ep.py
#   megatron   Megatron-LM's TestFlexDispatcher, which always takes eight ranks
#   training   a MoELayer of Megatron-Core, trained beside its all-to-all dispatcher
#
# With fewer GPUs than ranks, ranks share GPUs, and gloo is in the place of NCCL; DeepEP's times then mean
# nothing. Environment: FRAMEWORKS, RANKS (of all but megatron; one for each GPU, at least 2), TOKENS (1024:
# per rank, of DeepEP's tests), ITERATIONS (20: replays of a graph), LIMIT (150: seconds for a test), LOGS
# (build/framework_tests), CUDA_VISIBLE_DEVICES, PYTHON (python3).
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
if [ -z "${FRAMEWORKS:-}" ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
frameworks=$(cd "$FRAMEWORKS" && pwd) || exit 2
python=${PYTHON:-python3}
gpus=$($python -c 'import torch; print(torch.cuda.device_count())') || exit 2
ranks=${RANKS:-$((gpus > 2 ? gpus : 2))}
logs=${LOGS:-build/framework_tests}
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
failed=0

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export NUM_TOKENS_PER_RANK=${TOKENS:-1024} MAX_NUM_OF_TOKENS_PER_RANK=${TOKENS:-1024} ITERATIONS=${ITERATIONS:-20}
# nothing of Megatron-Core that torch would compile is under test
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
own=$root/tools/frameworks:$root/hybrid_ep/integrations/deep_ep/on_path:$root${PYTHONPATH:+:$PYTHONPATH}
torchrun=("$python" -W ignore -m torch.distributed.run --master-addr 127.0.0.1)
torchrun+=(--master-port $((20000 + RANDOM % 10000)) --nproc-per-node)

told_once() { # lines that ranks say alike, without their times
    sed -E 's/ in [0-9.]+s.*//; s/=+ ?//g; s/^ +//' | sort | uniq -c |
        awk '{n = $1; $1 = ""; print (n > 1 ? n " x" : "") $0}' | paste -sd ';' | sed 's/^ //' | cut -c1-500
}

run() { # name, framework, its own PYTHONPATH, what says how it went, command
    local name=$1 folder=$frameworks/$2 path=$3 words=$4 start=$SECONDS log=$logs/$1.log
    shift 4
    # theirs first on the path: Megatron-LM's tests are a package `tests` too
    (cd "$folder" && PYTHONPATH=$path:$own timeout "${LIMIT:-150}" "$@") >"$log" 2>&1
    local rc=$?
    [ $rc -eq 0 ] || failed=1
    echo "$name: rc $rc, $((SECONDS - start)) s, $(grep -aE "$words" "$log" | told_once)"
    grep -aE '^(FAILED|ERROR) |^[A-Za-z_.]*Error:' "$log" | cut -c1-200 | sort | uniq -c | head -5
}

deep_ep() { # name, test file
    run "$1" deepep "$frameworks/deepep/tests" ': PASS|check passed|: passed' \
        "$python" -W ignore -m deep_ep_tests "$2" "$ranks"
}

megatron() { # name, what says how it went, ranks, module and its arguments
    local name=$1 words=$2
    shift 2
    run "$name" megatron-lm "$frameworks/megatron-lm:$frameworks/megatron-core" "$words" \
        "${torchrun[@]}" "$1" -m "${@:2}"
}

names=("$@")
[ $# -gt 0 ] || names=(deep_ep graphs megatron training)
for name in "${names[@]}"; do
    case $name in
    deep_ep) deep_ep $name test_hybrid_ep ;;
    graphs) deep_ep $name test_graphed_hybrid_ep ;;
    megatron)
        megatron $name '[0-9]+ (passed|failed|error)' 8 pytest -p shared_gpus -p no:cacheprovider -W ignore -q \
            tests/unit_tests/transformer/moe/test_token_dispatcher.py -k 'TestFlexDispatcher or pad_uneven'
        ;;
    training) megatron $name '(passed|FAILED):' "$ranks" megatron_training ;;
    *)
        echo "no such name: $name" >&2
        exit 2
        ;;
    esac
done
exit $failed
