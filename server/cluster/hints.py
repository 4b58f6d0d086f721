"""Makes the hint of a request, by which a router chooses a replica: the instance and the names of the prompt's blocks.

Knows the messages to the engine and the settings; neither Ray nor the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from config.block_hashes import name_blocks
from config.settings import Settings
from server.engine.ipc.messages import Hello, Submit
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector

MAX_NAMES = 4096  # most blocks of a prompt that are named; a longer beginning makes no difference to the choice


class HintMaker:
    """Makes hints for requests under the given settings."""

    def __init__(self, settings: Settings) -> None:
        self._selector = Selector(settings.strategies.keys(), settings.rules, settings.default_strategy)

    def make(self, submit: Submit, hello: Hello, *, avoid: Sequence[str] = ()) -> dict[str, Any]:
        """Return the fields of `server.cluster.router.Hint` for a request; `avoid`: replicas that have failed it.

        The instance is the one that the request names, or the settings' rules choose. Rules about the memory in use,
        and roll-outs, may choose another one in the replica: then the expectation is wrong, and nothing else.
        """
        try:
            instance, _ = self._selector.choose(submit, kv_usage=0.0)
        except RequestError:  # any replica can refuse it
            return {"instance": None, "num_tokens": len(submit.prompt), "avoid": list(avoid)}
        strategy = next((each for each in hello.strategies if each.name == instance), None)
        block_size = 0 if strategy is None else strategy.block_size
        names: list[int] = []
        if strategy is not None and block_size and submit.caching.max_cached is None and min(submit.prompt) >= 0:
            caching = submit.caching
            salt = caching.tenant, caching.cache_salt, False  # the fields of cache_strategies.types.Salt
            beginning = submit.prompt[: MAX_NAMES * block_size]
            names = list(name_blocks(strategy.hash_root, block_size, beginning, salt))
        return {
            "instance": instance,
            "names": names,
            "block_size": block_size,
            "num_tokens": len(submit.prompt),
            "max_tokens": submit.sampling.max_tokens,
            "conversation": submit.conversation,
            "avoid": list(avoid),
        }
