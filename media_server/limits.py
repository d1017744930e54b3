"""What a key may use: its quotas and its budgets, as its row keeps them. What is None is not limited.

A quota bounds what is under way or comes again each day; a budget bounds what is spent in a month, or in all.
Months and days are those of UTC.
"""

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from media_server.errors import InvalidRequest
from media_server.validation import RequestModel

BudgetKind = Literal["gpu_seconds", "tokens"]
_BUDGET = re.compile(r"(?:(?P<label>.{1,128}):)?(?P<kind>gpu_seconds|tokens)=(?P<amount>[0-9.eE+]+)(?P<month>/month)?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)


class _Part(RequestModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Budget(_Part):
    """The most that a key may spend, or that it may spend on one project label."""

    kind: BudgetKind
    amount: Annotated[float, Field(ge=0)]
    per: Literal["month", "total"] = "total"
    label: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    def __str__(self) -> str:
        """Write the budget as `parse_budget` reads it."""
        label = f"{self.label}:" if self.label else ""
        return f"{label}{self.kind}={self.amount:.15g}{'/month' if self.per == 'month' else ''}"


class KeyLimits(_Part):
    """The quotas and budgets of one key."""

    # jobs that wait, the shots of films among them
    queued_jobs: Annotated[int, Field(ge=0)] | None = None
    # text requests at a time
    text_streams: Annotated[int, Field(ge=0)] | None = None
    # denoise steps x pixels x frames of what is submitted in a day
    work_per_day: Annotated[float, Field(ge=0)] | None = None
    # bytes of all inputs and results that are kept
    storage_bytes: Annotated[int, Field(ge=0)] | None = None
    budgets: tuple[Budget, ...] = ()
    # no limit, but kept with them: whether the words of its requests are forgotten (jobs/words.py)
    zero_retention: bool = False

    @property
    def has_quotas(self) -> bool:
        """Whether anything but budgets is limited."""
        return self.model_copy(update={"budgets": (), "zero_retention": False}) != KeyLimits()


def parse_budget(text: str) -> Budget:
    """Read `[LABEL:]gpu_seconds|tokens=AMOUNT[/month]`. Raises InvalidRequest if it is not written so."""
    found = _BUDGET.fullmatch(text)
    try:
        if found is None:
            raise ValueError(text)
        return Budget(
            kind="gpu_seconds" if found["kind"] == "gpu_seconds" else "tokens",
            amount=float(found["amount"]),
            per="month" if found["month"] else "total",
            label=found["label"],
        )
    except ValueError as error:
        rule = "[LABEL:]gpu_seconds=AMOUNT or tokens=AMOUNT, and /month if it comes again each month"
        raise InvalidRequest(f"budget: {rule}; got {text!r}.", param="budget", rule=rule, value=text) from error


def parse_amount(text: str, *, param: str) -> float:
    """Read a number with K, M, G or T for a thousand, a million and so on. Raises InvalidRequest."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        return float(found[1]) * _UNITS[found[2].upper()]
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        rule = "a number, such as 250, 10G or 2e12"
        raise InvalidRequest(f"{param}: {rule}; got {text!r}.", param=param, rule=rule, value=text)
    return amount
