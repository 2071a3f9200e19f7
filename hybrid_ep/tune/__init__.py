"""Numbers of SMs and a slice for one shape on these GPUs, as a Config; ``hybrid-ep tune``."""
