"""Statistics of the latest requests: how far a candidate is from what was served, and how fast requests were answered.

Memory is bounded: of each kind of sample the latest ones are kept, as many as the constants below say; totals count
all. Knows neither the bounds of a guard nor the stages of a roll-out.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.records import RequestFidelity, RequestRecord
from server.rollouts.intervals import (
    Estimate,
    clustered_mean,
    clustered_share,
    count_effective,
    quantile,
    wilson,
)

MAX_COMPARED = 2000  # number of compared requests that are kept: sums of each
MAX_TOKENS = 20_000  # number of compared tokens whose KL divergence is kept, for percentiles
MAX_SERVED = 1000  # number of served requests that are kept in each arm
# Nats; stands for an infinite divergence in the lower end of a mean's interval, as float32 ends near e^-103
MAX_KL = 100.0

_COMPARED = np.dtype(
    [
        ("tokens", "<f8"),
        ("kl", "<f8"),  # sum over the tokens, with MAX_KL for infinite ones
        ("infinite", "<f8"),  # number of tokens whose divergence is infinite or not a number
        ("agreed", "<f8"),
        ("rank", "<f8"),  # sum over the tokens
        ("saved", "<f8"),  # bytes
        ("failed", "<f8"),  # 1: the candidate failed
    ]
)
_TOKEN = np.dtype([("kl", "<f4"), ("request", "<i4")])
_SERVED = np.dtype(  # NaN: unknown
    [("first_token", "<f8"), ("inter_token", "<f8"), ("failed", "<f8"), ("conversation", "<i8")]
)


class SavedSamples(msgspec.Struct, frozen=True):
    """The contents of statistics, as they are written to disk: samples of each kind, oldest first, and totals."""

    rings: list[bytes]
    totals: dict[str, int]


class LatestSamples:
    """The latest samples of one or more kinds, oldest first, and totals of all."""

    kinds: ClassVar[Mapping[str, tuple[np.dtype[Any], int]]]  # dtype, and the number of samples that are kept

    def __init__(self) -> None:
        self.totals = Counter[str]()
        self._samples: dict[str, NDArray[Any]] = {kind: np.zeros(0, dtype) for kind, (dtype, _) in self.kinds.items()}

    def _append(self, kind: str, new: NDArray[Any]) -> None:
        self._samples[kind] = np.concatenate([self._samples[kind], new])[-self.kinds[kind][1] :]

    def save(self) -> SavedSamples:
        return SavedSamples([samples.tobytes() for samples in self._samples.values()], dict(self.totals))

    @classmethod
    def restore(cls, saved: SavedSamples) -> Self:
        """Return the statistics that were saved. Raises ValueError if they are damaged."""
        new = cls()
        for (kind, (dtype, _)), data in zip(cls.kinds.items(), saved.rings, strict=True):
            new._append(kind, np.frombuffer(data, dtype))
        new.totals.update(saved.totals)
        return new


class FidelityStatistics(LatestSamples):
    """How far a candidate instance is from the served one, over the latest requests that ran under both.

    Totals: "requests", of which "compared" (with tokens), "room", "failed"; "tokens".
    """

    kinds: ClassVar = {"requests": (_COMPARED, MAX_COMPARED), "tokens": (_TOKEN, MAX_TOKENS)}

    def record(self, fidelity: RequestFidelity) -> None:
        """Add a request that has ended."""
        kl = np.asarray(fidelity.kl, np.float64)
        finite = np.isfinite(kl)
        self.totals["requests"] += 1
        self.totals["compared"] += bool(len(kl))
        self.totals["tokens"] += len(kl)
        if fidelity.ended_early is not None:
            self.totals[fidelity.ended_early] += 1
        row = (
            len(kl),
            np.where(finite, kl, MAX_KL).sum(),
            len(kl) - finite.sum(),
            sum(fidelity.agreed),
            sum(fidelity.rank),
            fidelity.served_bytes - fidelity.candidate_bytes,
            fidelity.ended_early == "failed",
        )
        self._append("requests", np.array([row], _COMPARED))
        tokens = np.zeros(len(kl), _TOKEN)
        tokens["kl"], tokens["request"] = np.where(finite, kl, math.inf), self.totals["requests"]
        self._append("tokens", tokens)

    @property
    def _compared(self) -> NDArray[Any]:
        samples = self._samples["requests"]
        return samples[samples["tokens"] > 0]

    def mean_kl(self, confidence: float) -> Estimate:
        """Return the mean KL divergence per token; infinite if that of any token is, but with a finite lower end."""
        compared = self._compared
        mean = clustered_mean(compared["kl"], compared["tokens"], confidence)
        infinite = bool(compared["infinite"].any())
        value, high = (math.inf, math.inf) if infinite else (mean.value, mean.high)
        return Estimate(value, max(mean.low, 0.0), high)

    def kl_quantile(self, q: float, confidence: float) -> Estimate:
        """Return a quantile of the KL divergence of tokens. Its interval respects that those of a request are alike."""
        tokens = self._samples["tokens"]
        if not len(tokens):
            return quantile(tokens["kl"], q, confidence)
        value = quantile(tokens["kl"], q, confidence).value
        _, places, counts = np.unique(tokens["request"], return_inverse=True, return_counts=True)
        above = np.bincount(places, weights=tokens["kl"] > value).astype(np.float64)
        effective = count_effective(above, counts.astype(np.float64))
        found = quantile(tokens["kl"], q, confidence, effective)
        return found._replace(low=max(found.low, 0.0))

    def top1(self, confidence: float) -> Estimate:
        """Return the share of tokens at which both instances have the same likeliest token."""
        compared = self._compared
        return clustered_share(compared["agreed"], compared["tokens"], confidence)

    def errors(self, confidence: float) -> Estimate:
        """Return the share of requests in which the candidate failed."""
        failed = self._samples["requests"]["failed"]
        return wilson(float(failed.mean()) if len(failed) else 0.0, len(failed), confidence)

    def describe(self, confidence: float) -> dict[str, Any]:
        """Return all figures for JSON."""
        samples, compared = self._samples["requests"], self._compared
        tokens = float(compared["tokens"].sum())
        return {
            "requests": self.totals["requests"],
            "tokens": self.totals["tokens"],
            "kl_mean": self.mean_kl(confidence).describe(),
            "kl_p50": self.kl_quantile(0.5, confidence).describe(),
            "kl_p99": self.kl_quantile(0.99, confidence).describe(),
            "top1": self.top1(confidence).describe(),
            "mean_rank": float(compared["rank"].sum()) / tokens if tokens else None,
            "bytes_saved_per_request": float(samples["saved"].mean()) if len(samples) else None,
            "infinite_kl_tokens": int(compared["infinite"].sum()),
            "ended_early": {reason: self.totals[reason] for reason in ("room", "failed")},
            "latest": {"requests": len(samples), "percentile_tokens": len(self._samples["tokens"])},
        }


class ArmStatistics(LatestSamples):
    """How fast, and with how many errors, the latest requests of one arm of a roll-out's stage were served.

    Totals: "requests" that were not cancelled, of which "failed".
    """

    kinds: ClassVar = {"requests": (_SERVED, MAX_SERVED)}

    def record(self, record: RequestRecord) -> None:
        """Add a request that has ended. One that its client cancelled says nothing about errors, and is left out.

        A request that a fallback served has failed under the instance of this arm, and has no times of it.
        """
        if record.outcome == "cancelled":
            return
        is_moved = record.fallback_of is not None
        failed = is_moved or record.outcome == "error"
        self.totals["requests"] += 1
        self.totals["failed"] += failed
        first = math.nan if is_moved or record.first_token_seconds is None else record.first_token_seconds
        between = math.nan if is_moved else _mean_inter_token(record)
        row = (first, between, failed, zlib.crc32((record.conversation or "").encode()))
        self._append("requests", np.array([row], _SERVED))

    @property
    def first_token_seconds(self) -> NDArray[np.float64]:
        return _known(self._samples["requests"]["first_token"])

    @property
    def inter_token_seconds(self) -> NDArray[np.float64]:
        """The mean time between tokens of each request with two or more."""
        return _known(self._samples["requests"]["inter_token"])

    @property
    def num_conversations(self) -> int:
        """The number of conversations of the requests, which are alike within one; choices of a prompt are one."""
        return len(np.unique(self._samples["requests"]["conversation"]))

    @property
    def num_failed_conversations(self) -> int:
        """The number of conversations of which a request failed."""
        samples = self._samples["requests"]
        return len(np.unique(samples["conversation"][samples["failed"] > 0]))

    def errors(self, confidence: float) -> Estimate:
        """Return the share of requests that failed. Its interval respects that those of a conversation are alike."""
        samples = self._samples["requests"]
        _, places, counts = np.unique(samples["conversation"], return_inverse=True, return_counts=True)
        failed = np.bincount(places, weights=samples["failed"]).astype(np.float64)
        return clustered_share(failed, counts.astype(np.float64), confidence)

    def describe(self, confidence: float) -> dict[str, Any]:
        """Return all figures for JSON."""
        return {
            "requests": self.totals["requests"],
            "failed": self.totals["failed"],
            "errors": self.errors(confidence).describe(),
            "ttft_p95": quantile(self.first_token_seconds, 0.95, confidence).describe(),
            "itl_p95": quantile(self.inter_token_seconds, 0.95, confidence).describe(),
        }


def _known(samples: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(samples[~np.isnan(samples)], np.float64)


def _mean_inter_token(record: RequestRecord) -> float:
    if record.decode_seconds is None or record.generated_tokens < 2:
        return math.nan
    return record.decode_seconds / (record.generated_tokens - 1)
