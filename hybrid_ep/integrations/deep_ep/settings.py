"""What the Buffers need to know and no framework tells: by ``configure()``, or by the environment.

    configure(topk=8)          HYBRID_EP_TOPK=8
    configure(max_tokens=4096) HYBRID_EP_MAX_TOKENS=4096
    configure(num_sms=32)      HYBRID_EP_NUM_SMS=32

``configure()`` wins over the environment. All ranks must have the same settings.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from hybrid_ep.config import Config
from hybrid_ep.integers import as_integer

# Of torchtitan and of Megatron-Core up to 0.17; of NeMo Automodel. They count the SMs of DeepEP's
# kernels without its permute, and no user chose them.
_CONSUMER_DEFAULTS = (16, 24)


@dataclass(frozen=True)
class Settings:
    """Each is None where nobody has set it; see ``configure``."""

    topk: int | None = None
    max_tokens: int | None = None
    num_sms: int | None = None


_configured = Settings()


def configure(
    *, topk: int | None = None, max_tokens: int | None = None, num_sms: int | None = None
) -> None:
    """Set what HybridEPBuffers that are made from now on go by; None leaves a setting as it is.

    Args:
        topk: most experts of a token; times the size of the expert tensor parallel group where
            there is one. Unset: learnt from the first routing map of all ranks, which costs a wait
            and a gather, and rounded up to a power of two.
        max_tokens: most tokens that a rank dispatches in one call. Needed where ranks dispatch
            different numbers of tokens, which may grow. Unset: the most that a rank asked for when
            its HybridEPBuffer was made, rounded up to a multiple of 64.
        num_sms: SMs of dispatch and of combine, whatever the framework asks for.

    Raises:
        ValueError: a setting is no integer or less than 1.
    """
    global _configured
    given = {"topk": topk, "max_tokens": max_tokens, "num_sms": num_sms}
    given = {name: as_integer(name, n, 1) for name, n in given.items() if n is not None}
    _configured = replace(_configured, **given)


def forget() -> None:
    """Undo every ``configure``."""
    global _configured
    _configured = Settings()


def current() -> Settings:
    """What ``configure`` has set, else the environment.

    Raises:
        ValueError: a variable holds no positive integer.
    """
    found = {}
    for field in fields(Settings):
        value = getattr(_configured, field.name)
        variable = f"HYBRID_EP_{field.name.upper()}"
        text = os.environ.get(variable, "")
        if value is None and text:
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{variable} must be an integer of at least 1, got {text!r}")
            value = int(text)
        found[field.name] = value
    return Settings(**found)


def config_for(num_sms_dispatch: int | None, num_sms_combine: int | None) -> Config:
    """The Config of a HybridEPBuffer whose constructor got these numbers of SMs."""
    chosen = current().num_sms
    dispatch = chosen or _users_own(num_sms_dispatch)
    combine = chosen or _users_own(num_sms_combine)
    numbers = {}
    if dispatch is not None:
        numbers = {"num_sms_publish": dispatch, "num_sms_dispatch": dispatch}
    if combine is not None:
        numbers["num_sms_combine"] = combine
    return Config(**numbers)


def _users_own(num_sms: int | None) -> int | None:
    """None for a number that a framework passes where its user said nothing."""
    return None if num_sms in _CONSUMER_DEFAULTS else num_sms
