"""What is checked of a class: every promise that it makes, with each variant of its options."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from cache_strategies import registry
from cache_strategies.base import KVCache
from cache_strategies.plugins import HOW_TO_FIND
from cache_strategies.scorers import list_scorers
from cache_strategies.scorers.base import Scorer
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.backends import load_ops
from kernels.device import get_device
from kernels.ops import Ops
from plugin_kit.promise import CheckCase, Promise
from plugin_kit.scorers.promises import PROMISES as SCORER_PROMISES
from plugin_kit.scorers.trial import UNDER_COMPRESSED, ScorerTrial
from plugin_kit.strategies import PROMISES as STRATEGY_PROMISES
from plugin_kit.strategies.attention import finds_dropped_keys
from plugin_kit.strategies.trial import StrategyTrial
from plugin_kit.variants import Variant, list_variants

TrialT = TypeVar("TrialT", StrategyTrial, ScorerTrial)


def load_plugin(name: str) -> type[KVCache] | type[Scorer]:
    """Import a class by "module:Class". Raises SettingsError unless it is a complete strategy or scorer."""
    module, colon, qualname = name.partition(":")
    if not (module and colon and qualname):
        place = (registry.list_kinds() | list_scorers()).get(name)
        hint = f"such as {place}" if place else "such as my_package.cache:MyCache"
        raise SettingsError(f"{name!r} is not a class as MODULE:CLASS, {hint}")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_own = module.startswith(error.name or module)  # else it imports something that is missing
        hint = f"; {HOW_TO_FIND}" if is_own else ""
        raise SettingsError(f"cannot import {name}: {error}{hint}") from None
    except Exception as error:  # importing runs the author's code
        raise SettingsError(f"cannot import {name}: {type(error).__name__}: {error}") from error
    try:
        cls = attrgetter(qualname)(imported)
    except AttributeError:
        raise SettingsError(f"the module {module} has no class {qualname}") from None
    if not (isinstance(cls, type) and issubclass(cls, KVCache | Scorer)):
        raise SettingsError(
            f"{name} is neither a strategy nor a scorer: it must be a subclass of cache_strategies.base.KVCache or of "
            "cache_strategies.scorers.base.Scorer"
        )
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise SettingsError(f"{cls.__name__} does not define {', '.join(missing)}, which its base class leaves to it")
    return registry.load_kind(name) if issubclass(cls, KVCache) else cls


def load_fastest_ops() -> Ops:
    """Return the operations with which a server on this machine's CPU computes."""
    return load_ops(get_device("cpu"), torch.float32).ops


class PluginCheck:
    """All checks of a class."""

    def __init__(
        self,
        name: str,
        seed: int,
        given: Sequence[Mapping[str, Any]] = (),
        make_ops: Callable[[], Ops] = load_fastest_ops,
    ) -> None:
        """Load a class, MODULE:CLASS, and find options for it, or take those `given`.

        Raises SettingsError if it cannot be checked.
        """
        self.name, self.seed = name, seed
        self.cls: type[Any] = load_plugin(name)
        self._given, self._make_ops = given, make_ops
        self.variants = list(self._iter_usable(list_variants(self.cls, given)))

    @property
    def is_strategy(self) -> bool:
        return issubclass(self.cls, KVCache)

    def _iter_usable(self, variants: Sequence[Variant]) -> Iterator[Variant]:
        """Yield the variants with which the class can be built. Raises SettingsError for those that were declared."""
        declared = [{}, *getattr(self.cls, "test_options", ()), *self._given]
        for variant in variants:
            try:
                self._try_building(variant.options)
            except SettingsError:
                if variant.options in declared:
                    raise
                continue
            yield variant

    def _try_building(self, options: Mapping[str, Any]) -> None:
        rng = random.Random(0)
        if self.is_strategy:
            self._make_strategy_trial(options, rng).make_world()
        else:
            self._make_scorer_trial(options, rng).make_scorer()

    def _make_strategy_trial(self, options: Mapping[str, Any], rng: random.Random) -> StrategyTrial:
        settings = StrategySettings.model_validate({"kind": self.name, **options})
        return StrategyTrial(settings, self._make_ops(), rng)

    def _make_scorer_trial(self, options: Mapping[str, Any], rng: random.Random) -> ScorerTrial:
        return ScorerTrial(self.name, self.cls, options, self._make_ops(), rng)

    def list_cases(self, words: str = "") -> list[CheckCase]:
        """Return the cases whose promise has `words` in its name, in the order of the promises."""
        found: list[CheckCase] = []
        if self.is_strategy:
            for promise in STRATEGY_PROMISES:
                found += self._iter_cases(promise, self._make_strategy_trial)
        else:
            for each in SCORER_PROMISES:
                found += self._iter_cases(each, self._make_scorer_trial)
        return [case for case in found if words.lower() in case.promise.lower()]

    def _iter_cases(
        self, promise: Promise[TrialT], make_trial: Callable[[Mapping[str, Any], random.Random], TrialT]
    ) -> Iterator[CheckCase]:
        files = list_sources(self.cls)
        for variant in self.variants:
            run = partial(_run, promise, partial(make_trial, variant.options))
            yield CheckCase(promise.name, variant.name, promise.expected, self.seed, run, files)

    def find_weakness(self) -> str | None:
        """Return why the checks prove little, if they do: nothing was dropped by a class that says that it drops."""
        rng = random.Random(self.seed)
        trials: list[StrategyTrial] = []
        for variant in self.variants:
            if self.is_strategy:
                trials.append(self._make_strategy_trial(variant.options, rng))
            else:
                scorer = self._make_scorer_trial(variant.options, rng)
                trials += [scorer.make_strategy_trial(options) for options in UNDER_COMPRESSED]
        dropping = [trial for trial in trials if not trial.contract.exact]
        if not dropping or any(finds_dropped_keys(trial) for trial in dropping):
            return None
        return (
            "it says that it is not exact, and has dropped no key in texts of 150 tokens, so this proves little: give "
            "options with which it drops some, as --options or as test_options of the class"
        )


def _run(promise: Promise[TrialT], make_trial: Callable[[random.Random], TrialT], rng: random.Random) -> bool:
    """Check a promise if it is made; return whether it is."""
    trial = make_trial(rng)
    if not promise.is_made(trial):
        return False
    promise.check(trial)
    return True


def list_sources(cls: type[Any]) -> list[Path]:
    """Return the source files of a class and its bases that are not this project's own."""
    own = ("cache_strategies.", "plugin_kit.", "builtins", "abc", "typing")
    modules = [sys.modules.get(base.__module__) for base in cls.__mro__ if not base.__module__.startswith(own)]
    files = (inspect.getsourcefile(module) for module in modules if module is not None)
    return [Path(file) for file in files if file]


def list_cases(name: str, seed: int | None = None) -> list[CheckCase]:
    """Return all cases of a class, MODULE:CLASS, for tests that run them; by default with new random numbers."""
    return PluginCheck(name, random.SystemRandom().randrange(1 << 32) if seed is None else seed).list_cases()
