"""The promises of strategies, by what they are about. A module has a list `PROMISES`, the most basic ones first."""

from __future__ import annotations

from collections.abc import Sequence

from plugin_kit.promise import Promise
from plugin_kit.strategies import attention, histories, long_texts, memory, repetition, values
from plugin_kit.strategies.trial import StrategyTrial

PROMISES: Sequence[Promise[StrategyTrial]] = (
    *values.PROMISES,
    *attention.PROMISES,
    *repetition.PROMISES,
    *memory.PROMISES,
    *long_texts.PROMISES,
    *histories.PROMISES,
)
