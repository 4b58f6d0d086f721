"""How many functions a piece of work calls: what can be held against a number of requests or blocks without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """Functions that were called, in Python and in C. What runs within one in C is not seen."""
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # whoever wants to know of collections is called at each
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
