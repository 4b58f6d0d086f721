"""Computes the answers to compare with: each request alone on an idle server. Knows neither load nor faults."""

from __future__ import annotations

from random import Random

from tools.torture.checker import Checker
from tools.torture.exchange import Exchange
from tools.torture.requests import RequestSpec, draw_specs, make_reference_sending


class ExpectedAnswerError(Exception):
    """A request fails even when it is alone on the server."""


async def compute_answers(
    url: str, exchange: Exchange, checker: Checker, draw: Random, number: int
) -> list[RequestSpec]:
    """Return random requests, and give `checker` their expected answers. Raises ExpectedAnswerError."""
    specs = draw_specs(draw, number)
    for spec in specs:
        outcome = await exchange.send(url, spec, make_reference_sending(spec))
        if outcome.failure is not None:
            raise ExpectedAnswerError(f"{spec.name} fails on an idle server: {outcome.failure} {dict(spec.body)}")
        checker.expected_answers[spec.name] = outcome.answer
    return specs
