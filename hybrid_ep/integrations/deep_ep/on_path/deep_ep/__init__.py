"""HybridEPBuffer of DeepEP's hybrid-ep branch, served by hybrid_ep; this is not DeepEP.

There is no ``Buffer`` here: ``from deep_ep import Buffer`` must fail.
"""

from hybrid_ep import __version__ as _version
from hybrid_ep.integrations.deep_ep import HybridEPBuffer

__all__ = ["HybridEPBuffer"]
__version__ = f"0+hybrid.ep.{_version}"
