"""The interface of DeepEP's hybrid-ep branch, served by this library.

Megatron-Core (flex dispatcher, ``hybridep``), torchtitan and NeMo Automodel import
``deep_ep.HybridEPBuffer``. After ``install()`` they find this one, and their code is unchanged:

    import hybrid_ep.integrations.deep_ep
    hybrid_ep.integrations.deep_ep.install()        # before the framework is imported

Where no line can be added, put the folder that ``hybrid-ep deep-ep-path`` prints on PYTHONPATH.

    installation      the module deep_ep, in sys.modules
    settings          what a framework does not say: configure() and environment variables
    hybrid_ep_buffer  HybridEPBuffer
    handle            what its dispatch_with_permute returns last
    buffers           the Buffers behind it: how they are made, and how they grow
    routing           routing from one form into another
    topk              the number of experts per token, which a framework does not tell
    unpermuted        dispatch and combine without permute

There is no ``Buffer`` and no ``ElasticBuffer``, so a framework's other DeepEP backends stay off.
Everything that users should know is logged by the logger ``hybrid_ep.integrations``.
"""

from hybrid_ep.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from hybrid_ep.integrations.deep_ep.installation import install, uninstall
from hybrid_ep.integrations.deep_ep.routing import indices_to_map
from hybrid_ep.integrations.deep_ep.settings import configure

__all__ = ["HybridEPBuffer", "configure", "indices_to_map", "install", "uninstall"]
