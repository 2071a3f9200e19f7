"""What a call raises, as a rank tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raised(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


# not by ``raised``: an error that a frame holds keeps that frame, and so all callers, alive


def what_it_raises(call: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    """The text; empty if nothing."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def raised_by(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text; empty if nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
