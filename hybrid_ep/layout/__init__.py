"""Sizes of the memory that kernels know, for machines without the extension.

A file ``x_layout.py`` repeats the sizes of ``csrc/layout/x_layout.h``; tests compare them with the
built extension. Those of ``record_layout.h`` are properties of ``Shape``. ``network_window`` sizes
the queues between nodes, which NVSHMEM owns.
"""
