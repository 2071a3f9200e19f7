"""The commands of ``python -m hybrid_ep``, one module each.

A command module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int``, the
exit code: 0 for success, 1 for a check that failed or a machine that lacks something, 2 for usage.
``run`` raises ``ValueError`` for wrong usage, ``OSError`` and ``RanksFailed``: ``__main__`` prints
them. ``files`` checks the files that commands write.
"""
