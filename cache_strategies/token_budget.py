"""The type of an option that says how many tokens stay, or are read: a number of them, or a share of the text."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


def _refuse_bool(budget: object) -> object:
    """Raise ValueError for true and false, which would count as 1 and 0."""
    if isinstance(budget, bool):
        raise ValueError(f"should be a number of tokens or a share of the text, not {str(budget).lower()}")
    return budget


def _check_token_budget(budget: int | float) -> int | float:
    if isinstance(budget, float) and not 0 < budget < 1:
        raise ValueError(f"a share must be above 0 and below 1, not {budget}; a number of tokens has no point")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"a number of tokens must be at least 1, not {budget}")
    return budget


TokenBudget = Annotated[int | float, BeforeValidator(_refuse_bool), AfterValidator(_check_token_budget)]
