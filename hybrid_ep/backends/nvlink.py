"""The nvlink backend: CUDA kernels between the GPUs of one host.

    route      publish_routing, assign_rows   top-k to every rank; the handle; M to the host
    dispatch   dispatch                       x to my outbox; my copies from the peers' outboxes
    combine    combine                        my experts' sums to their homes; my inbox to y

The symmetric memory is mapped through CUDA IPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_ep.backends import kernels

if TYPE_CHECKING:
    from hybrid_ep.buffer import Buffer

try:
    from hybrid_ep import _nvlink
except ImportError as error:
    _nvlink = None
    _import_error = error


def load_extension() -> Any:
    """``hybrid_ep._nvlink``.

    Raises:
        ImportError: it is not there; the text says why.
    """
    if _nvlink is None:
        raise ImportError(f"the extension hybrid_ep._nvlink is not there ({_import_error})")
    return _nvlink


def unavailable_reason(buffer: Buffer) -> str | None:
    """What this rank lacks for the nvlink backend, as a sentence; None if nothing."""
    return kernels.what_is_lacking("nvlink", buffer, load_extension)


class NvlinkBackend(kernels.KernelBackend):
    """See the module; the methods are those of ``Backend``.

    Raises:
        RuntimeError: the memory of a rank could not be allocated or mapped; on all ranks.
    """

    name = "nvlink"

    def __init__(self, buffer: Buffer) -> None:
        topology = buffer.topology
        self._remember(buffer)
        num_sms = min(buffer.gather(kernels.num_sms(buffer.device)))
        mine = b""
        try:
            self._runtime = _nvlink.Runtime(
                _nvlink.RuntimeConfig(**kernels.runtime_settings(buffer, num_sms))
            )
            self._ends_with(self._runtime.destroy)
            mine = self._runtime.ipc_handle() if topology.num_ranks > 1 else b""
            failure = None
        except Exception as error:  # whatever it is, no rank may wait for this one
            failure = str(error)
        parts = buffer.gather((failure, mine))
        self._raise_together(buffer, [failure for failure, _ in parts])
        try:
            self._runtime.open_peers([handle for _, handle in parts])
            failure = None
        except Exception as error:
            failure = str(error)
        self._raise_together(buffer, buffer.gather(failure))
        self.layout_size = self._runtime.handle_words

    def _raise_together(self, buffer: Buffer, failures: list[str | None]) -> None:
        """Raise the first rank's failure on all ranks, if there is one, and give all memory back.

        Peers may have mapped this rank's part before one of them failed, so all ranks unmap before
        any frees.
        """
        try:
            kernels.raise_together(failures)
        except RuntimeError:
            if self._runtime is not None:
                self._runtime.unmap_peers()
            buffer.gather(None)
            if self._runtime is not None:
                self._runtime.free_now()
                self._end.detach()
            raise

    def describe(self) -> str:
        megabytes = self._runtime.symmetric_bytes / 1e6
        return f"nvlink: CUDA kernels, {megabytes:.1f} MB of symmetric memory through CUDA IPC"

    def reclaim(self) -> None:
        _nvlink.free_unread_memory()
