"""Names that frameworks import from this module of DeepEP."""

from hybrid_ep.integrations.deep_ep import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
