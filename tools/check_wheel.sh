#!/usr/bin/env bash
# Builds a wheel as `pip wheel .` does, installs it into a clean environment, and uses it there from
# another folder: import, the extensions, `hybrid-ep doctor`, `hybrid-ep check` on the CPU. Prints how
# long it took. TORCH=2.6.0 tools/check_wheel.sh takes that version of torch, without it the pinned one.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
torch=${TORCH:-$(sed -n 's/^torch==//p' "$root/requirements.txt")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

echo "== wheel"
"$python" -m venv "$work/env"
"$python" -m pip wheel -q --no-deps -w "$work/dist" "$root"
ls "$work/dist"

echo "== a clean environment with torch $torch"
"$work/env/bin/pip" install -q "torch==$torch" "$work"/dist/*.whl

cd "$work"
"$work/env/bin/python" - <<'PYTHON'
import hybrid_ep
from hybrid_ep.backends.cuda import build, nvlink
package = build._PACKAGE
assert "site-packages" in str(package), package
report = build.read_report(package)
print("hybrid_ep", hybrid_ep.__version__, "built:", report["built"], "left out:", report["left_out"])
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
echo "== $SECONDS s"
