"""Computes the expected answers: each request runs alone on an idle server."""

from __future__ import annotations

from random import Random

from tools.torture.checker import Checker
from tools.torture.exchange import HttpClient
from tools.torture.requests import RequestSpec, draw_specs, make_reference_options


class ExpectedAnswerError(Exception):
    """Raised when a request fails although it is alone on the server."""


async def compute_answers(
    url: str, exchange: HttpClient, checker: Checker, draw: Random, number: int
) -> list[RequestSpec]:
    """Return `number` random requests, and store their answers in `checker`. Raises ExpectedAnswerError."""
    specs = draw_specs(draw, number)
    for spec in specs:
        outcome = await exchange.send(url, spec, make_reference_options(spec))
        if outcome.failure is not None:
            raise ExpectedAnswerError(f"{spec.name} fails on an idle server: {outcome.failure} {dict(spec.body)}")
        checker.expected_answers[spec.name] = outcome.answer
    return specs
