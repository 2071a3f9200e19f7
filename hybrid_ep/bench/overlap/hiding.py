"""How much of two things that run at once is hidden, and how much SM time allows."""

from __future__ import annotations


def hidden(alone_us: float, other_us: float, both_us: float) -> float:
    """Part of the shorter that costs no time: 1 where ``both_us`` is the longer of the two.

    Args:
        alone_us: time of one of them alone.
        other_us: time of the other alone.
        both_us: from the start of both to the end of the later.
    """
    return (alone_us + other_us - both_us) / min(alone_us, other_us)


def allowed(communication_us: float, products_us: float, sms: int, total_sms: int) -> float:
    """The most that can be hidden where products take all SMs that communication leaves.

    Products are ``products_us * total_sms`` of SM time, which runs on ``total_sms - sms`` SMs
    beside communication and on all of them after it.

    Args:
        communication_us: time of communication alone.
        products_us: time of the products alone, on all SMs.
        sms: SMs that communication occupies.
        total_sms: of the GPU.
    """
    busy = (communication_us * sms + products_us * total_sms) / total_sms
    return hidden(communication_us, products_us, max(communication_us, busy))
