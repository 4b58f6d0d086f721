"""Makes the hints from which a router chooses replicas: a request's instance, and the names of its prompt's blocks.

Knows the messages to the engine and the settings; neither Ray nor the router's policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from config.block_hashes import BlockNamer
from config.settings import Settings
from server.engine.ipc.messages import Hello, Submit
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector

MAX_NAMES = 4096  # most names in a hint: a longer prompt is routed by its first 4096 blocks


class RequestHint:
    """The hint of a request: `fields`, whose list of names grows with the answer.

    The router is in this process and keeps the list. So it knows at once what the next turn of a chat will find.
    """

    def __init__(self, fields: dict[str, Any], namer: BlockNamer | None = None) -> None:
        self.fields = fields
        self._namer = namer
        self._last_tokens: Sequence[int] = ()  # output tokens that are not in the cache yet

    def add_output(self, tokens: Sequence[int]) -> None:
        """Add the names of blocks that output tokens complete; the last token is not in the cache yet."""
        if self._namer is not None and tokens:
            self._namer.extend([*self._last_tokens, *tokens[:-1]])
            self._last_tokens = tokens[-1:]


class HintMaker:
    """Makes hints for requests under the given settings."""

    def __init__(self, settings: Settings) -> None:
        self._selector = Selector(settings.strategies.keys(), settings.rules, settings.default_strategy)

    def make(self, submit: Submit, hello: Hello, *, avoid: Sequence[str] = ()) -> RequestHint:
        """Return the hint of a request, with the fields of `server.cluster.router.Hint`.

        `avoid` are replicas that have failed it. The instance is the one that the request names or the settings' rules
        choose. In the replica, rules about the memory in use and roll-outs may choose another instance: then the router
        expects cached tokens that are not there, and nothing else is wrong.
        """
        fields: dict[str, Any] = {"num_tokens": len(submit.prompt), "max_tokens": submit.sampling.max_tokens}
        fields |= {"conversation": submit.conversation, "avoid": list(avoid)}
        try:
            instance = self._selector.choose_before_rollouts(submit, kv_usage=0.0).instance
        except RequestError:  # any replica can refuse it
            return RequestHint(fields)
        fields["instance"] = instance
        strategy = next((each for each in hello.strategies if each.name == instance), None)
        looks_up = submit.caching.max_cached is None and min(submit.prompt) >= 0
        if strategy is None or not strategy.block_size or not looks_up:
            return RequestHint(fields)
        # The fields of cache_strategies.types.Salt
        salt = submit.caching.tenant, submit.caching.cache_salt, False
        namer = BlockNamer(strategy.hash_root, strategy.block_size, salt)
        beginning = submit.prompt[: MAX_NAMES * strategy.block_size]
        namer.extend(beginning)
        fields |= {"names": namer.names, "block_size": strategy.block_size}
        return RequestHint(fields, namer if len(beginning) == len(submit.prompt) else None)
