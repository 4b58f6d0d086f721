"""The settings of roll-outs: from which instance to which, in which stages, and what a guard does not let pass.

Knows shares and numbers. `settings.py` has the tables; `server/rollouts` carries roll-outs out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from config.quantities import parse_percentage, write_percentage
from config.units import Duration, Proportion
from config.wording import explain_problem

MAX_HOLD = 30 * 24 * 3600  # maximum length of a stage, in seconds
MAX_STAGES = 100


def _check_percentage(value: Any) -> str:
    text = str(write_percentage(value))
    if not 0 <= parse_percentage(text) <= 100:
        raise ValueError(f"{text!r}: a percentage has to be between 0% and 100%")
    return text


Percentage = Annotated[str, BeforeValidator(_check_percentage)]
"""A share of requests, such as "5%", which may be written as 0.05."""


def to_fraction(percentage: str) -> float:
    """Return a percentage as a number from 0 to 1."""
    return float(parse_percentage(percentage) / 100)


class GuardSettings(BaseModel):
    """The bounds that a roll-out's candidate has to keep. A bound that is None is not checked.

    A roll-out is rolled back if the confidence interval of a figure lies wholly beyond its bound.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    board: bool = Field(
        False,
        description="take the bounds of divergence and times from what `kvmux evaluate --board` has measured, in the "
        'folder of the setting `board`, where this table has none; `guard = "board"` is short for this key alone',
    )
    kl_mean: float | None = Field(
        0.05,
        gt=0,
        description="greatest mean KL divergence per token, in nats; keys and values in 8 bits cause far less than "
        "0.01, a window that cuts off what the model needs more than 0.1",
    )
    kl_p99: float | None = Field(
        1.0,
        gt=0,
        description="greatest 99th percentile of the KL divergence per token, in nats: the mean hides a few tokens "
        "at which the answer takes another way",
    )
    top1: Proportion | None = Field(
        0.95,
        ge=0,
        le=1,
        description="least share of tokens at which both instances have the same likeliest token; keys and values in "
        "8 bits change fewer than one likeliest token in a hundred",
    )
    ttft_p95_ratio: float | None = Field(
        2.0,
        gt=0,
        description="greatest ratio of the 95th percentiles of the time to the first token, candidate to baseline; "
        "well above 1, as the candidate's prefix cache is empty at first",
    )
    itl_p95_ratio: float | None = Field(
        1.5,
        gt=0,
        description="greatest ratio of the 95th percentiles of a request's mean time between tokens; lower than for "
        "the first token, as no cold cache delays later ones",
    )
    errors: Proportion | None = Field(
        0.02,
        ge=0,
        le=1,
        description="greatest share of failed requests, and of comparisons in which the candidate failed; above 0, as "
        "some requests fail whatever the instance",
    )
    min_requests: int = Field(
        50,
        ge=1,
        le=1_000_000,
        description="least number of requests in a stage before the next one begins; with 50, a mean's error is about "
        "a seventh of the spread between requests",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """Return None for "off": TOML has no null."""
        return None if value == "off" else value

    def fill(self, bounds: Mapping[str, float]) -> GuardSettings:
        """Return this guard with further bounds, by name, where it was given none."""
        return self.model_copy(update={k: bound for k, bound in bounds.items() if k not in self.model_fields_set})


def read_guard(value: Any) -> Any:
    """Return the table for which the word "board" stands; whatever else is given stays."""
    return {"board": True} if value == "board" else value


class RolloutSettings(BaseModel):
    """A staged roll-out: requests that are served by one instance are served by another one, a growing share of them.

    First some requests also run under the candidate (shadow), while `from` answers them. Then the candidate serves the
    shares `canary`, one stage after the other.
    """

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    from_: str = Field(alias="from", description="instance that serves the requests now (the baseline)")
    to: str = Field(description="instance that is to serve them (the candidate)")
    shadow: Percentage = Field(
        "5%", description="share of the requests served by `from` that also run under `to`, whose answer is discarded"
    )
    canary: list[Percentage] = Field(
        default_factory=lambda: ["1%", "10%", "50%", "100%"],
        description="shares of the requests that `to` serves, one for each stage, rising",
    )
    hold: Duration = Field(600.0, ge=0, le=MAX_HOLD, description="least length of each stage")
    guard: Annotated[GuardSettings, BeforeValidator(read_guard)] = Field(
        default_factory=GuardSettings,
        description='bounds that the candidate has to keep: a table, or `"board"` for those that a board has measured',
    )

    @field_validator("canary")
    @classmethod
    def _check_canary(cls, value: list[str]) -> list[str]:
        shares = [parse_percentage(each) for each in value]
        if not 1 <= len(shares) <= MAX_STAGES:
            raise ValueError(f'should have 1 to {MAX_STAGES} shares, such as ["1%", "10%", "100%"]')
        if shares[0] <= 0 or any(a >= b for a, b in pairwise(shares)):
            raise ValueError(f'{", ".join(value)}: the shares should rise, from more than 0%; write ["1%", "10%"]')
        return value

    @model_validator(mode="after")
    def _check_instances(self) -> RolloutSettings:
        if self.from_ == self.to:
            raise ValueError(f"from and to are both {self.to!r}; name two instances")
        return self

    @property
    def shadow_share(self) -> float:
        return to_fraction(self.shadow)

    @property
    def canary_shares(self) -> list[float]:
        return [to_fraction(each) for each in self.canary]


def check_rollouts(rollouts: Mapping[str, RolloutSettings], strategies: Collection[str]) -> None:
    """Raise ValueError if a roll-out names an instance that does not exist, or if two of them hinder each other."""
    by_from: dict[str, str] = {}  # name of the roll-out by its `from`
    for name, rollout in rollouts.items():
        if not is_rollout_name(name):
            raise ValueError(f"rollouts: {name!r} is not a name: use letters, digits, '-' and '_'")
        for key, instance in (("from", rollout.from_), ("to", rollout.to)):
            if instance not in strategies:
                known = ", ".join(sorted(strategies))
                raise ValueError(f"rollouts.{name}.{key}: there is no instance {instance!r}; instances are {known}")
        other = by_from.setdefault(rollout.from_, name)
        if other != name:
            raise ValueError(
                f"rollouts.{name}.from: the requests of {rollout.from_!r} are those of rollouts.{other} already; "
                "remove one of the two"
            )
    for name, rollout in rollouts.items():
        seen = {rollout.from_}
        instance = rollout.to
        while instance not in seen and instance in by_from:
            seen.add(instance)
            instance = rollouts[by_from[instance]].to
        if instance in seen:
            raise ValueError(f"rollouts.{name}: roll-outs lead from {instance!r} back to it; remove one of them")


def is_rollout_name(name: str) -> bool:
    """Return whether a text can name a roll-out: it becomes part of reasons, metrics and URLs."""
    return len(name) <= 100 and name.isascii() and name.replace("_", "").replace("-", "").isalnum()


def parse_rollout(values: Mapping[str, Any]) -> RolloutSettings:
    """Return the settings of a roll-out that an operator starts. Raises ValueError that names the wrong key."""
    try:
        return RolloutSettings.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError("; ".join(_format_problem(each) for each in error.errors())) from None


def _format_problem(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        keys = GuardSettings.model_fields if problem["loc"][0] == "guard" else RolloutSettings.model_fields
        return f"{where} is not a key of a roll-out; keys are {', '.join(key.rstrip('_') for key in keys)}"
    return explain_problem(where, problem)
