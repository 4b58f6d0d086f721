"""The type of an option that says how many tokens stay, or are read: a number of them, or a share of the text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from config.quantities import parse_proportion
from config.wording import format_value


def _read_token_budget(budget: Any) -> int | float:
    """Return a number, which may be given as text: a share such as "25%" or "0.25" as float, tokens such as "128".

    Raises ValueError for another value; true and false would otherwise count as 1 and 0.
    """
    try:
        if isinstance(budget, str):
            return int(budget) if budget.strip().isdecimal() else parse_proportion(budget)
    except ValueError:
        pass
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        given = format_value(budget)
        raise ValueError(f"should be a number of tokens such as 128, or a share of the text such as 25%, not {given}")
    return budget


def _check_token_budget(budget: int | float) -> int | float:
    if isinstance(budget, float) and not 0 < budget < 1:
        raise ValueError(f"a share must be above 0 and below 1, not {budget}; a number of tokens has no point")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"a number of tokens must be at least 1, not {budget}")
    return budget


TokenBudget = Annotated[
    int | float,
    BeforeValidator(_read_token_budget, json_schema_input_type=int | float | str),
    AfterValidator(_check_token_budget),
]
