"""A seed repeats every request, and the way a request is sent touches nothing that decides its answer."""

from __future__ import annotations

from random import Random

from tools.torture.requests import INSTANCES, draw_send_options, draw_specs, make_body, make_reference_options


def test_a_seed_repeats_everything() -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    first, again = ([*draw_specs(draw, 50), draw.random()] for draw in (Random(seed), Random(seed)))
    assert first == again


def test_the_manner_touches_nothing_that_decides_the_answer() -> None:
    draw = Random()
    for spec in draw_specs(draw, 100):
        for options in (make_reference_options(spec), draw_send_options(draw, spec)):
            body = make_body(spec, options)
            assert spec.body.items() <= body.items()
            assert options.instance in INSTANCES[spec.family]
            assert not (options.stream and "best_of" in body)
