"""What this machine has and what each backend needs of it; ``hybrid-ep doctor``.

machine     the facts, with
  nvidia      what NVIDIA's tools and driver say
diagnosis   the needs of each backend, and what to do where one is not met
"""
