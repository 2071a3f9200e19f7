"""What a rank does beside its work: files written, programs started."""

from __future__ import annotations

import sys
from typing import Any

import hybrid_ep
from tests.cases import Case
from tests.launch import Rank
from tests.ranks.verbs import send

# events of Python's audit hooks
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
WRITES = ("os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "shutil.rmtree")


def watch_a_step(me: Rank, case: Case, backend: str) -> list[str]:
    """Everything that a first Buffer and its first calls leave on the machine."""
    import torch._dynamo  # noqa: F401 (torch does in the first call of any op, and makes a folder)

    traces: list[str] = []
    watching = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event == "open":
            path, mode, flags = args
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & 3
            if writes and not str(path).startswith("/proc/"):  # shared memory has no name elsewhere
                traces.append(f"open {path}")
        elif event in STARTS + WRITES:
            traces.append(f"{event} {args}")

    sys.dont_write_bytecode = True
    sys.addaudithook(hook)  # for good: a hook cannot be taken away
    buffer = me.buffer(**case.sizes(), backend=backend)
    out = send(me, buffer, case.inputs(me.rank))
    hybrid_ep.combine(buffer, out.rows, out.handle)
    buffer.destroy()
    watching = False
    return traces
