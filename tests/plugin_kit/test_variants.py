"""The options with which a class is checked: declared ones, defaults, and smaller ones so that windows wrap."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field

from cache_strategies.compressed.options import CompressedOptions
from cache_strategies.paged.cache import PagedCache
from cache_strategies.sliding_window import SlidingWindowCache, WindowOptions
from config.errors import SettingsError
from plugin_kit.variants import list_variants, scale_options


class ModestOptions(BaseModel):
    """Options of which one may not be small."""

    window: int = Field(512, ge=1)
    lanes: int = Field(64, ge=32)
    sinks: int = 4
    share: float = 0.5


class Declares:
    """A class that says how it should be checked."""

    options_type = WindowOptions
    test_options = ({"window": 3},)


def test_large_numbers_are_scaled_together_and_small_ones_stay() -> None:
    assert scale_options(WindowOptions, 20) == {"window": 20}
    assert scale_options(CompressedOptions, 20) == {"every": 20, "recent": 2, "block_size": 2}


def test_a_number_that_may_not_be_small_is_left_out() -> None:
    assert scale_options(ModestOptions, 16) == {"window": 16}


def test_defaults_come_first_then_what_the_class_declares_then_smaller_ones() -> None:
    assert [variant.options for variant in list_variants(Declares)] == [
        {},
        {"window": 3},
        {"window": 20},
        {"window": 5},
    ]
    assert [variant.name for variant in list_variants(Declares)][:2] == ["the defaults", '{"window": 3}']


def test_given_options_replace_all_others() -> None:
    assert [variant.options for variant in list_variants(Declares, [{"window": 9}])] == [{"window": 9}]


@pytest.mark.parametrize("cls", [SlidingWindowCache, PagedCache])
def test_wrong_options_are_told_with_those_that_there_are(cls: type) -> None:
    with pytest.raises(
        SettingsError, match=rf"{cls.__name__} cannot have the options .*: nothing is not known; remove it; its options"
    ):
        list_variants(cls, [{"nothing": 1}])


def test_declared_options_must_be_a_list_of_options() -> None:
    wrong = type("Wrong", (), {"options_type": WindowOptions, "test_options": {"window": 3}})
    with pytest.raises(SettingsError, match=r"Wrong\.test_options must be a list of options"):
        list_variants(wrong)
