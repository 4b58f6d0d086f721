"""One roll-out: its state and stage, and when it advances, is rolled back, or is changed by an operator.

    shadow ──> canary, stage 1 of n ──> ... ──> stage n ──> complete
    any of these ──> rolled_back (by its guard) or aborted (by an operator; by a restart without its instances)

In `shadow`, a share of the requests also runs under the candidate, whose answer is discarded. In `canary` the candidate
serves a share of the conversations, and a share of the requests that stay is still shadowed. A roll-out advances when
its guard passes and the stage has lasted `hold` seconds. While it is paused it does not advance; its guard still rolls
it back. Once it is complete, it is not watched any more.

Knows its clock, settings and statistics; neither the file nor other roll-outs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from config.rollouts import RolloutSettings
from server.engine.scheduling.request import RequestError
from server.records import REPORT_CONFIDENCE, RequestFidelity, RequestRecord
from server.rollouts.guard import StageStatistics, judge
from server.rollouts.statistics import ArmStatistics, FidelityStatistics
from server.rollouts.store import RolloutChange, RolloutState, SavedRollout

log = logging.getLogger(__name__)

RolloutAction = Literal["pause", "resume", "advance", "abort"]

MAX_HISTORY = 100  # number of changes that are kept


class Rollout:
    """The state of one roll-out, and the statistics of its current stage."""

    def __init__(
        self, name: str, settings: RolloutSettings, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Make a roll-out in its first stage. `clock` measures durations; `wall` returns seconds since 1970."""
        self.name = name
        self.settings = settings
        self.guard = settings.guard
        self.declared: dict[str, Any] | None = None
        self.instances: dict[str, Any] = {}
        self.state: RolloutState = "shadow" if settings.shadow_share else "canary"
        self.stage = 0  # index in settings.canary; 0 in state "shadow"
        self.paused = False
        self.reason = ""  # of the last change
        self.fidelity = FidelityStatistics()
        self.baseline, self.canary = ArmStatistics(), ArmStatistics()
        self.history: deque[RolloutChange] = deque(maxlen=MAX_HISTORY)
        self.since = wall()
        self._clock, self._wall = clock, wall
        self._elapsed, self._resumed = 0.0, clock()
        self._judge()

    # ---------------------------------------------------------------- what it is now
    @property
    def is_active(self) -> bool:
        """Whether it still compares: its guard watches, and it advances."""
        return self.state in ("shadow", "canary")

    @property
    def holds_requests(self) -> bool:
        """Whether requests of its `from` are subject to it."""
        return self.is_active or self.state == "complete"

    @property
    def share(self) -> float:
        """The share of conversations that the candidate serves."""
        if self.state == "canary":
            return self.settings.canary_shares[self.stage]
        return 1.0 if self.state == "complete" else 0.0

    @property
    def shadow_share(self) -> float:
        """The share of the requests that stay on `from` which also run under the candidate."""
        return self.settings.shadow_share if self.is_active else 0.0

    @property
    def elapsed(self) -> float:
        """The seconds of the current stage, without those in which no server ran."""
        return self._elapsed + self._clock() - self._resumed

    @property
    def label(self) -> str:
        """The state in words, with the stage."""
        if self.state != "canary":
            return self.state.replace("_", " ")
        return f"canary {self.settings.canary[self.stage]} (stage {self.stage + 1} of {len(self.settings.canary)})"

    # ---------------------------------------------------------------- samples
    def record_request(self, record: RequestRecord) -> None:
        """Count a request of `from` that has ended in the arm of the instance that was chosen for it."""
        if self.state == "canary":
            arms = {self.settings.from_: self.baseline, self.settings.to: self.canary}
            if (arm := arms.get(record.fallback_of or record.instance)) is not None:
                arm.record(record)

    def record_fidelity(self, fidelity: RequestFidelity) -> None:
        """Count a request that also ran under the candidate."""
        if self.is_active:
            self.fidelity.record(fidelity)

    @property
    def num_samples(self) -> tuple[int, ...]:
        """The numbers of comparisons and of requests in each arm, also of those that are no longer kept."""
        return tuple(each.totals["requests"] for each in (self.fidelity, self.baseline, self.canary))

    # ---------------------------------------------------------------- changes
    def update(self) -> None:
        """Let the guard look at samples that it has not seen yet; roll back, or advance if it is time."""
        if not self.is_active:
            return
        if self.num_samples != self._num_judged:
            self._judge()
        if self.verdict.outcome == "tripped":
            self.roll_back(self.verdict.reason)
        elif self.paused:
            return
        elif self.state == "shadow" and not self.settings.shadow_share:  # there is nothing to wait for
            self._advance("no requests are shadowed", None)
        elif self.verdict.outcome == "passed" and self.elapsed >= self.settings.hold:
            self._advance(f"{self.verdict.reason} after {self.elapsed:.0f} s", None)

    def _judge(self) -> None:
        """Let the guard judge the statistics. This takes about a millisecond."""
        is_compared = bool(self.settings.shadow_share) and self.share < 1
        in_canary = self.state == "canary"
        statistics = StageStatistics(
            self.fidelity if is_compared or self.fidelity.totals["requests"] else None,
            self.baseline if in_canary and self.share < 1 else None,
            self.canary if in_canary else None,
        )
        self.verdict, self._num_judged = judge(self.guard, statistics), self.num_samples

    def set_bounds(self, bounds: Mapping[str, float]) -> None:
        """Let the guard check further bounds, where the settings have none."""
        self.guard = self.settings.guard.fill(bounds)
        self._judge()

    def roll_back(self, reason: str) -> None:
        """Return all requests to `from`, as the candidate is not good enough."""
        assert self.is_active
        self._enter("rolled_back", 0, reason, None)

    def abort(self, reason: str, by: str | None = None) -> None:
        """Return all requests to `from`, for a reason other than the guard's."""
        self._enter("aborted", 0, reason, by)

    def begin(self, reason: str, by: str | None) -> None:
        """Note the start in the history and the log."""
        self._note("none", reason, by)

    def begin_paused(self, reason: str) -> None:
        """Start without any effect on answers, until an operator resumes it."""
        self.state, self.paused = "shadow", True
        self._judge()
        self._note("none", reason, None)

    def control(self, action: RolloutAction, by: str) -> None:
        """Do what an operator asks for. Raises RequestError if the state does not allow it."""
        allowed = self.is_active or (action == "abort" and self.state == "complete")
        if not allowed:
            hint = "start it again" if not self.holds_requests else "abort it to return its requests"
            message = f"roll-out {self.name!r} is {self.label}, so {action} has no effect: {hint}"
            raise RequestError(409, message, code="rollout_ended")
        match action:
            case "pause" | "resume":
                if self.paused != (action == "pause"):
                    before, self.paused = self._label_with_pause(), action == "pause"
                    self._note(before, f"{action}d by an operator", by)
            case "advance":
                self._advance("advanced by an operator", by)
            case "abort":
                self.abort("aborted by an operator", by)

    def _advance(self, reason: str, by: str | None) -> None:
        if self.state == "shadow":
            self._enter("canary", 0, reason, by)
        elif self.stage + 1 < len(self.settings.canary):
            self._enter("canary", self.stage + 1, reason, by)
        else:
            self._enter("complete", self.stage, reason, by)

    def _enter(self, state: RolloutState, stage: int, reason: str, by: str | None) -> None:
        """Enter a state and stage; the arms are counted anew, but those of an ended roll-out stay to be seen."""
        before = self._label_with_pause()
        self.state, self.stage = state, stage
        if self.is_active:
            self.baseline, self.canary = ArmStatistics(), ArmStatistics()
            self._judge()
        else:
            self.paused = False
        self.since, self._elapsed, self._resumed = self._wall(), 0.0, self._clock()
        self._note(before, reason, by)

    def _label_with_pause(self) -> str:
        return f"{self.label}, paused" if self.paused else self.label

    def _note(self, before: str, reason: str, by: str | None) -> None:
        self.reason = reason
        after = self._label_with_pause()
        self.history.append(RolloutChange(self._wall(), before, after, reason, by))
        level = logging.WARNING if self.state in ("rolled_back", "aborted") else logging.INFO
        origin = f" (by {by})" if by is not None else ""
        log.log(level, "roll-out %s: %s -> %s: %s%s", self.name, before, after, reason, origin)

    # ---------------------------------------------------------------- for operators and the file
    def describe(self) -> dict[str, Any]:
        """Return the roll-out for GET /v1/rollouts."""
        is_canary = self.state == "canary"
        return {
            "name": self.name,
            "settings": self.settings.model_dump(mode="json") | {"guard": self.guard.model_dump(mode="json")},
            "state": self.state,
            "paused": self.paused,
            "stage": self.stage + 1 if is_canary else None,
            "stages": len(self.settings.canary),
            "share": self.share,
            "since": self.since,
            "elapsed_seconds": self.elapsed,
            "reason": self.reason,
            "verdict": {"outcome": self.verdict.outcome, "reason": self.verdict.reason},
            "guards": [check.describe() for check in self.verdict.checks],
            "fidelity": self.fidelity.describe(REPORT_CONFIDENCE),
            "baseline": self.baseline.describe(REPORT_CONFIDENCE),
            "canary": self.canary.describe(REPORT_CONFIDENCE),
            "history": [
                {"time": c.time, "from": c.before, "to": c.after, "reason": c.reason, "by": c.by} for c in self.history
            ],
        }

    def save(self) -> SavedRollout:
        return SavedRollout(
            name=self.name,
            settings=self.settings.model_dump(mode="json", exclude_unset=True),  # a board fills what is not given
            declared=self.declared,
            instances=self.instances,
            state=self.state,
            stage=self.stage,
            paused=self.paused,
            reason=self.reason,
            since=self.since,
            elapsed=self.elapsed,
            history=list(self.history),
            fidelity=self.fidelity.save(),
            baseline=self.baseline.save(),
            canary=self.canary.save(),
        )

    @classmethod
    def restore(cls, saved: SavedRollout, clock: Callable[[], float], wall: Callable[[], float]) -> Rollout:
        """Return a roll-out as it was saved. Raises ValueError if that is damaged."""
        new = cls(saved.name, RolloutSettings.model_validate(saved.settings), clock, wall)
        if not 0 <= saved.stage < len(new.settings.canary):
            raise ValueError(f"roll-out {saved.name!r} has no stage {saved.stage}")
        new.state, new.stage, new.paused, new.reason = saved.state, saved.stage, saved.paused, saved.reason
        new.declared, new.instances = saved.declared, saved.instances
        new.since, new._elapsed = saved.since, saved.elapsed
        new.history.extend(saved.history)
        new.fidelity = FidelityStatistics.restore(saved.fidelity)
        new.baseline, new.canary = ArmStatistics.restore(saved.baseline), ArmStatistics.restore(saved.canary)
        new._judge()
        return new
