"""The promises of strategies, by what they are about: those of each module in order, the most basic ones first."""

from __future__ import annotations

from collections.abc import Sequence

from plugin_kit.promise import Promise
from plugin_kit.strategies import attention, histories, long_texts, memory, repetition, values
from plugin_kit.strategies.trial import StrategyTrial

PROMISES: Sequence[Promise[StrategyTrial]] = [
    found
    for module in (values, attention, repetition, memory, long_texts, histories)
    for found in vars(module).values()
    if isinstance(found, Promise)
]
