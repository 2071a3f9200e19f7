"""A mixture-of-experts language model and its training, on text that every machine has.

    torchrun --nproc-per-node 2 -m examples.lm                  # from the root of the repository
    torchrun --nproc-per-node 2 -m examples.lm --way nccl       # the same in plain torch
    torchrun --nproc-per-node 2 -m examples.lm --preset small --lr 3e-3   # in a minute, on the CPU

docs/overlap.md explains it and its output.

    options.py      the command line, the presets
    text.py         bytes of Python's standard library, in an order that a position determines
    moves.py        the two ways: dispatch and combine of hybrid_ep, or of plain torch
    spans.py        how long dispatch and combine take, forward and backward
    model.py        attention, experts, a shared expert, and their overlap
    parallel.py     which rank holds which parameter: FSDP2, experts; gradients, clipping, AdamW
    checkpoints.py  save, and resume on any number of ranks
    trainer.py      one step of all that
    report.py       the results of a run: lines and JSON
    train.py        the loop
"""
