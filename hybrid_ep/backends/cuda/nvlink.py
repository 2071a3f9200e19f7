"""The nvlink backend's memory: CUDA kernels between the GPUs of one host.

    route      publish_routing, assign_rows   top-k to every rank; the handle; M to the host
    dispatch   dispatch                       x to my outbox; my copies from the peers' outboxes
    combine    combine                        my experts' sums to their homes; my inbox to y

The symmetric memory is mapped through CUDA IPC.
"""

from __future__ import annotations

from typing import Any

from hybrid_ep.backends.cuda import build
from hybrid_ep.config import Config
from hybrid_ep.errors import SetupError
from hybrid_ep.group import Group
from hybrid_ep.shape import Shape

try:
    from hybrid_ep import _nvlink

    build.refuse_other_build(_nvlink)
except ImportError as error:
    _nvlink = None
    _import_error = error


def load_extension() -> Any:
    """``hybrid_ep._nvlink``.

    Raises:
        ImportError: it is not there, or was built from other sources; the text says which.
    """
    if _nvlink is None:
        raise ImportError(
            f"the extension hybrid_ep._nvlink cannot be imported: {_import_error}"
            f"{build.why_left_out('hybrid_ep._nvlink')}"
        )
    return _nvlink


class Memory:
    """The runtime of a Buffer, made by its ``settings``, and memory that CUDA IPC maps; collective.

    Raises:
        SetupError: the memory of a rank could not be allocated or mapped; on all ranks.
    """

    name = "nvlink"
    least_sms = 1  # of a call

    def __init__(
        self, shape: Shape, group: Group, config: Config, settings: dict[str, Any]
    ) -> None:
        self.runtime: Any = None
        handle = b""
        try:
            with group.alike(Exception):  # whatever it is, no rank may wait for this one
                self.runtime = _nvlink.Runtime(_nvlink.RuntimeConfig(**settings))
                if shape.num_ranks > 1:
                    handle = self.runtime.ipc_handle()
            handles = group.gather(handle)
            with group.alike(Exception):
                self.runtime.open_peers(handles)
        except SetupError:
            # peers may have mapped this rank's part before one of them failed, so all ranks unmap
            # before any frees
            if self.runtime is not None:
                self.runtime.unmap_peers()
            group.gather(None)
            if self.runtime is not None:
                self.runtime.free_now()
            raise

    def describe(self) -> str:
        """What the memory is."""
        return "symmetric memory through CUDA IPC"

    def give_back(self) -> None:
        """Not needed any more, here; what peers have mapped is kept until they have not."""
        self.runtime.destroy()

    def reclaim(self) -> None:
        """Free what was kept for peers, once all ranks have given theirs back."""
        _nvlink.free_unread_memory()
