"""The command line of hybrid_ep: what may be typed, and what is said of it.

A package of its own, because ``import hybrid_ep`` imports torch and registers the ops: help and
usage errors need neither, and nothing here imports more than the standard library until a command
runs. A module per command has ``HELP`` (one line) and ``add_arguments(parser)``; its docstring is
the description. The command itself is ``hybrid_ep.<command>.command``, with ``run(args) -> int``,
the exit code: 0 for success, 1 for a check that failed or a machine that lacks something, 2 for
usage. ``run`` raises ``ValueError`` for wrong usage, ``OSError`` and ``RanksFailed``: ``main``
prints them.
"""
