"""Expert-parallel dispatch and combine for training mixture-of-experts models in PyTorch.

buffer = hybrid_ep.Buffer(group, hidden=7168, num_experts=256, max_tokens=4096, topk=8)
out = hybrid_ep.dispatch(buffer, x, topk_idx, topk_weights)
y_rows = experts(out.rows, out.offsets)
y = hybrid_ep.combine(buffer, y_rows, out.handle, weights=out.weights)
"""

from hybrid_ep._version import __version__
from hybrid_ep.buffer import Buffer, combine, combine_values, dispatch
from hybrid_ep.config import Config
from hybrid_ep.errors import PeerError
from hybrid_ep.handle import Dispatched, Handle
from hybrid_ep.maps import map_to_topk, topk_to_dense
from hybrid_ep.ops import SAC_SAVE_OPS, checkpoint

__all__ = [
    "SAC_SAVE_OPS",
    "Buffer",
    "Config",
    "Dispatched",
    "Handle",
    "PeerError",
    "__version__",
    "checkpoint",
    "combine",
    "combine_values",
    "dispatch",
    "map_to_topk",
    "topk_to_dense",
]
