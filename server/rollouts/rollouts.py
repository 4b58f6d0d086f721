"""All roll-outs of a server: counts what the engine reports, lets stages advance, says how requests are divided.

`observe` counts records, `update` judges them and makes stages advance, `list_splits` is what the engine does from then
on; operators `start` and `control` roll-outs. Keeps the state in a file. Knows the names of instances, but neither the
engine nor requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from config.rollouts import RolloutSettings, check_rollouts, is_rollout_name, parse_rollout
from config.settings import Settings
from server.engine.ipc.messages import BoardBounds, SetSplits, Split
from server.engine.scheduling.request import RequestError
from server.records import REPORT_CONFIDENCE, RequestFidelity, RequestRecord
from server.rollouts.rollout import Rollout, RolloutAction
from server.rollouts.statistics import FidelityStatistics
from server.rollouts.store import DamagedFileError, FileInUseError, RolloutChange, RolloutStore, SavedRollout

log = logging.getLogger(__name__)

SAVE_SECONDS = 1.0  # statistics are written at most once in this time
MAX_ROLLOUTS = 100  # number of roll-outs that are remembered


class Rollouts:
    """The roll-outs of a server, by name."""

    def __init__(
        self,
        settings: Settings,
        store: RolloutStore,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Make the roll-outs of the settings. They begin with `restore`, which has to be called once."""
        self._declared = settings.rollouts
        self._strategies = settings.strategies
        self._model = {name: getattr(settings, name) for name in ("model", "revision", "dtype", "weights")}
        self._store, self._clock, self._wall = store, clock, wall
        self._board: BoardBounds | None = None
        self._pairs: dict[tuple[str, str], FidelityStatistics] = {}
        self._rollouts: dict[str, Rollout] = {name: self._make_declared(name) for name in self._declared}
        self._saved_at = clock()
        self._saved_changes, self._saved_counts = self._list_changes(), self._list_counts()

    # ---------------------------------------------------------------- messages of the engine, and to it
    def set_board(self, board: BoardBounds | None) -> None:
        """Take the bounds of the board that the engine has read, for the roll-outs whose guard asks for it.

        A roll-out that has none there, as the model or a strategy is another one now, is aborted. Bounds that are known
        stay if a later engine could not read the board.
        """
        self._board = board or self._board
        for rollout in self._rollouts.values():
            if rollout.is_active:
                try:
                    self._set_bounds(rollout)
                except ValueError as error:
                    rollout.abort(str(error))

    def _set_bounds(self, rollout: Rollout) -> None:
        """Let a roll-out take its bounds from the board, if its guard asks for it. Raises ValueError if it has none."""
        settings = rollout.settings
        if settings.guard.board:
            if self._board is None:
                raise ValueError("the server has no board: start it with the setting board, or write bounds")
            bounds = self._board.find(settings.from_, settings.to)
            if bounds is not None:
                rollout.set_bounds(bounds)

    def list_splits(self) -> SetSplits:
        """Return how requests are to be divided now."""
        splits = [
            Split(r.name, r.settings.from_, r.settings.to, r.share, r.shadow_share, not r.is_active)
            for r in self._rollouts.values()
            if r.holds_requests
        ]
        states: dict[str, tuple[str, float]]
        states = {name: ("paused" if r.paused else r.state, r.share) for name, r in self._rollouts.items()}
        compared = [(r.settings.from_, r.settings.to) for r in self._rollouts.values() if r.settings.shadow_share]
        pairs = list(dict.fromkeys([*compared, *self._pairs]))
        return SetSplits(splits, states, pairs)

    def observe(self, fidelities: Iterable[RequestFidelity], finished: Iterable[RequestRecord]) -> None:
        """Count comparisons of requests, each of its pair and its roll-out, and requests that have ended.

        A request counts in its arm of a roll-out, unless it named its instance.
        """
        for fidelity in fidelities:
            pair = fidelity.served, fidelity.candidate
            self._pairs.setdefault(pair, FidelityStatistics()).record(fidelity)
            rollout = self._rollouts.get(fidelity.rollout or "")
            if rollout is not None and (rollout.settings.from_, rollout.settings.to) == pair:
                rollout.record_fidelity(fidelity)
        for record in finished:
            rollout = self._rollouts.get(record.rollout or "")
            if rollout is not None and record.conversation is not None:
                rollout.record_request(record)

    def update(self) -> None:
        """Let guards look at new samples and stages advance whose time has come, and write what is new to the file."""
        for rollout in self._rollouts.values():
            rollout.update()
        self._save()

    def roll_back_unusable(self, instances: Collection[str]) -> None:
        """Roll back the active roll-outs whose candidates get no requests, as they are in quarantine or disabled."""
        for rollout in self._rollouts.values():
            if rollout.is_active and rollout.settings.to in instances:
                rollout.roll_back(f"instance {rollout.settings.to!r} gets no requests after repeated faults")
        self._save()

    # ---------------------------------------------------------------- operators
    def start(self, name: str, settings: Mapping[str, Any], by: str) -> dict[str, Any]:
        """Start a roll-out and return its description. Raises RequestError if it cannot start."""
        old = self._rollouts.get(name)
        if old is not None and old.holds_requests:
            raise RequestError(409, f"roll-out {name!r} is {old.label}: abort it first", code="rollout_exists")
        if not is_rollout_name(name):
            raise RequestError(400, f"{name!r} is not a name: use letters, digits, '-' and '_'", param="name")
        if old is None and len(self._rollouts) >= MAX_ROLLOUTS:
            self._forget_ended()
        try:
            parsed = parse_rollout(settings)
            others = {r.name: r.settings for r in self._rollouts.values() if r.holds_requests}
            check_rollouts({name: parsed}, self._strategies)
        except ValueError as error:
            raise RequestError(400, str(error), param="settings") from None
        try:
            check_rollouts(others | {name: parsed}, self._strategies)
        except ValueError as error:
            raise RequestError(409, str(error), code="rollout_exists") from None
        new = self._make(name, parsed)
        try:
            self._set_bounds(new)
        except ValueError as error:
            raise RequestError(400, str(error), param="guard") from None
        self._rollouts[name] = new
        new.begin("started by an operator", by)
        self._save()
        return new.describe()

    def _forget_ended(self) -> None:
        """Forget the roll-out that ended first, to make room. Raises RequestError if none has ended."""
        ended = [r for r in self._rollouts.values() if not r.holds_requests and r.name not in self._declared]
        if not ended:
            raise RequestError(409, f"there are {MAX_ROLLOUTS} roll-outs already: abort one", code="too_many_rollouts")
        del self._rollouts[min(ended, key=lambda r: r.since).name]

    def control(self, name: str, action: RolloutAction, by: str) -> dict[str, Any]:
        """Pause, resume, advance or abort a roll-out; return its description. Raises RequestError if that cannot be."""
        rollout = self._rollouts.get(name)
        if rollout is None:
            known = ", ".join(sorted(self._rollouts)) or "none"
            raise RequestError(404, f"there is no roll-out {name!r}; there are: {known}", code="not_found")
        rollout.control(action, by)
        self._save()
        return rollout.describe()

    def describe(self) -> dict[str, Any]:
        """Return all roll-outs for GET /v1/rollouts."""
        return {"object": "list", "data": [rollout.describe() for rollout in self._rollouts.values()]}

    def describe_fidelity(self) -> dict[str, Any]:
        """Return how far candidates are from what was served, since the server's start, for GET /v1/fidelity."""
        return {
            "object": "list",
            "confidence": REPORT_CONFIDENCE,
            "data": [
                {"served": served, "candidate": candidate, **statistics.describe(REPORT_CONFIDENCE)}
                for (served, candidate), statistics in self._pairs.items()
            ],
        }

    # ---------------------------------------------------------------- the file
    def restore(self) -> None:
        """Continue where the file says that roll-outs were, and write to it from now on.

        A roll-out whose settings or instances have changed begins anew. If the file cannot be read, a candidate may
        have been rolled back: the roll-outs of the settings then wait, paused, without any effect on answers.
        """
        try:
            saved = self._store.open()
            restored = {each.name: new for each in saved if (new := self._restore_one(each)) is not None}
        except FileInUseError as error:
            self._begin_paused(str(error), "another server uses the file with its state")
        except (DamagedFileError, ValueError, KeyError) as error:
            aside = self._store.set_aside()
            problem = f"it cannot be read ({error})" + (f" and is now {aside}" if aside is not None else "")
            self._begin_paused(problem, "the file with its state could not be read")
        else:
            for name in [name for name in self._declared if name not in restored]:
                self._rollouts[name].begin("declared in the settings", None)
            self._rollouts |= restored
            self._abort_conflicts(restored.keys() - self._declared.keys())
        if self._rollouts:
            self._write()

    def _restore_one(self, saved: SavedRollout) -> Rollout | None:
        """Return a roll-out as the file has it; None if that of the settings replaces it, or if it was removed there.

        Raises ValueError if the file is damaged.
        """
        rollout = Rollout.restore(saved, self._clock, self._wall)
        if saved.declared != self._describe_declared(saved.name):
            log.info("roll-out %s: the settings have changed, so what was known about it is dropped", saved.name)
            return None
        gone = [each for each in (rollout.settings.from_, rollout.settings.to) if each not in self._strategies]
        if gone:
            if rollout.holds_requests:
                rollout.abort(f"the settings have no instance {gone[0]!r} any more")
        elif saved.instances != self._describe_instances(rollout.settings):
            fresh = self._make(saved.name, rollout.settings, saved.declared)
            fresh.begin("begun anew, as the settings of its instances have changed", None)
            return fresh
        return rollout

    def _abort_conflicts(self, started: set[str]) -> None:
        """Abort roll-outs of operators whose `from` a roll-out of the settings has now."""
        kept = {n: r.settings for n, r in self._rollouts.items() if n not in started and r.holds_requests}
        for name in sorted(started):
            mine = self._rollouts[name]
            if not mine.holds_requests:
                continue
            try:
                check_rollouts(kept | {name: mine.settings}, self._strategies)
            except ValueError as error:
                mine.abort(str(error))
            else:
                kept[name] = mine.settings

    def _begin_paused(self, problem: str, reason: str) -> None:
        """Let the roll-outs of the settings wait for an operator, as their state is not known."""
        log.error(
            "the file with the state of roll-outs, %s: %s; roll-outs of the settings are paused and serve no request "
            "until an operator resumes them; those started by an operator have to be started again",
            self._store.path,
            problem,
        )
        for name in self._declared:
            self._rollouts[name] = self._make_declared(name)
            self._rollouts[name].begin_paused(f"{reason}: resume it, or abort it")

    def _make_declared(self, name: str) -> Rollout:
        return self._make(name, self._declared[name], self._describe_declared(name))

    def _make(self, name: str, settings: RolloutSettings, declared: dict[str, Any] | None = None) -> Rollout:
        new = Rollout(name, settings, self._clock, self._wall)
        new.declared = self._describe_declared(name) if declared is None else declared
        new.instances = self._describe_instances(settings)
        return new

    def _describe_declared(self, name: str) -> dict[str, Any] | None:
        """Return what the settings give, also if that is a default: a bound of a board does not replace it."""
        declared = self._declared.get(name)
        return None if declared is None else declared.model_dump(mode="json", exclude_unset=True)

    def _describe_instances(self, settings: RolloutSettings) -> dict[str, Any]:
        """Return what a comparison of a roll-out's instances depends on, as JSON has it: their settings, the model."""
        names = (settings.from_, settings.to)
        described = {n: self._strategies[n].model_dump(mode="json", exclude={"floor", "limit"}) for n in names}
        described["model"] = self._model
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(described))
        return plain

    def _save(self) -> None:
        """Write the state: at once if a roll-out has changed, once in SAVE_SECONDS if only statistics are new."""
        is_due = self._clock() - self._saved_at >= SAVE_SECONDS
        if self._list_changes() != self._saved_changes or (is_due and self._has_unsaved):
            self._write()

    @property
    def _has_unsaved(self) -> bool:
        is_saved = self._list_changes() == self._saved_changes and self._list_counts() == self._saved_counts
        return self._store.has_failed or not is_saved

    def _list_changes(self) -> dict[str, RolloutChange | None]:
        """Return the latest change of each roll-out."""
        return {name: rollout.history[-1] if rollout.history else None for name, rollout in self._rollouts.items()}

    def _list_counts(self) -> dict[str, tuple[int, ...]]:
        """Return the numbers of samples of each roll-out."""
        return {name: rollout.num_samples for name, rollout in self._rollouts.items()}

    def _write(self) -> None:
        self._saved_at = self._clock()
        self._saved_changes, self._saved_counts = self._list_changes(), self._list_counts()
        self._store.write([rollout.save() for rollout in self._rollouts.values()])

    def close(self) -> None:
        """Write what is new, and release the file: another server may go on with the roll-outs."""
        if self._has_unsaved:
            self._write()
        self._store.close()
