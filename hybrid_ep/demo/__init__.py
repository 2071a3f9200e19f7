"""The parts of ``hybrid-ep demo``."""
