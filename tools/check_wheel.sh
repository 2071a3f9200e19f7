#!/usr/bin/env bash
# Builds a wheel as `pip wheel .` does, installs it into a clean environment, and uses it there from
# another folder: import, the extensions, `hybrid-ep doctor`, `hybrid-ep check` on the CPU. Prints how
# long each step took. What `make build` compiled is not compiled again.
#
# TORCH=2.6.0 takes that version of torch, without it the pinned one. TORCH=oldest takes the oldest that
# pyproject.toml allows; where that cannot be installed within LIMIT_S seconds (120) it says so, in capitals,
# and goes on with the pinned one.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
pinned=$(sed -n 's/^torch==//p' "$root/requirements.txt")
torch=${TORCH:-$pinned}
fallback=
if [[ $torch == oldest ]]; then
    torch=$(sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' "$root/pyproject.toml")
    [[ $torch == *.*.* ]] || torch=$torch.0
    fallback=$pinned
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

step() { echo "== $1 ($SECONDS s so far)"; }

# A clean environment with torch $1 and the wheel, within $2 seconds. No constraints file of this machine
# applies: it may exclude old versions.
make_environment() {
    rm -rf "$work/env"
    "$python" -m venv "$work/env"
    PIP_CONSTRAINT=/dev/null timeout "$2" \
        "$work/env/bin/pip" install -qq --no-compile "torch==$1" "$work"/dist/*.whl
}

step wheel
"$python" -m pip wheel -q --no-deps -w "$work/dist" "$root"
ls "$work/dist"

step "a clean environment with torch $torch"
if [[ -z $fallback ]]; then
    make_environment "$torch" 3600
elif ! make_environment "$torch" "${LIMIT_S:-120}"; then
    echo "NOT CHECKED: torch $torch, THE OLDEST SUPPORTED, could not be installed in ${LIMIT_S:-120} s."
    echo "Checked instead: torch $fallback."
    make_environment "$fallback" 3600
fi

step use
cd "$work"
"$work/env/bin/python" - <<'PYTHON'
import torch
import hybrid_ep
from hybrid_ep.backends.cuda import build, nvlink
package = build._PACKAGE
assert "site-packages" in str(package), package
report = build.read_report(package)
print(f"hybrid_ep {hybrid_ep.__version__} with torch {torch.__version__}; built:", report["built"])
print("left out:", report["left_out"] or "nothing")
assert set(report["built"]) | set(report["left_out"]) == {"hybrid_ep._nvlink", "hybrid_ep._nvshmem"}
for module in report["built"]:
    assert list(package.glob(f"{module.partition('.')[2]}.*.so")), module
if "hybrid_ep._nvlink" in report["built"]:
    nvlink.load_extension()
    print("the extension loads")
PYTHON
"$work/env/bin/hybrid-ep" doctor > doctor.txt || { cat doctor.txt; exit 1; }
tail -n 1 doctor.txt
"$work/env/bin/hybrid-ep" check --ranks 2 --device cpu | tail -n 1
step done
