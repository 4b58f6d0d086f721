"""The robust slope, against lines whose slope is known."""

from __future__ import annotations

from random import Random

import pytest

from tools.torture.growth import MAX_POINTS, Trend, fit_slope, second_half


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Random:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    return Random(seed)


def test_a_line_has_its_slope_and_no_doubt(draw: Random) -> None:
    slope = draw.uniform(-5, 5)
    found = fit_slope([(x, 3 + slope * x) for x in range(50)])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((slope, slope, slope))


def test_outliers_do_not_matter(draw: Random) -> None:
    points = [(float(x), 2.0 * x) for x in range(100)]
    for index in draw.sample(range(100), 10):
        points[index] = (float(index), draw.choice((-1e6, 1e6)))
    found = fit_slope(points)
    assert found is not None
    assert found.value == pytest.approx(2, abs=0.01)


def test_the_interval_holds_the_slope_nearly_always(draw: Random) -> None:
    """19 of 20 times where errors are independent: of 200 draws 14 may miss by chance, 30 may not."""
    hits = 0
    for _ in range(200):
        found = fit_slope([(float(x), 0.5 * x + draw.gauss(0, 10)) for x in range(30)])
        assert found is not None
        hits += found.low <= 0.5 <= found.high
    assert hits >= 170


def test_many_points_are_reduced_and_lie_on_the_same_line() -> None:
    found = fit_slope([(float(x), 7.0 * x) for x in range(8 * MAX_POINTS + 41)])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((7, 7, 7))


def test_few_points_have_no_slope() -> None:
    assert fit_slope([(0.0, 1.0), (1.0, 2.0)]) is None


def test_the_second_half_is_of_time() -> None:
    assert second_half([(0, 1), (1, 1), (2, 1), (10, 5), (20, 6)]) == [(10, 5), (20, 6)]


@pytest.mark.parametrize(("mib_an_hour", "grows"), [(20, False), (30, True)])
def test_a_process_grows_if_the_whole_interval_lies_above_the_bound(
    mib_an_hour: float, grows: bool, draw: Random
) -> None:
    points = [(x / 720, 300 + mib_an_hour * x / 720 + draw.uniform(-0.1, 0.1)) for x in range(720)]
    assert Trend("engine", 300, 320, fit_slope(points)).exceeds(24) == grows
