"""The retry schedule of Standard Webhooks and what each answer means."""

import email.utils
import random

import pytest

from media_server.webhooks.retries import MAX_ATTEMPTS, Verdict, judge

NOW = 1_764_400_000.0


def rng() -> random.Random:
    return random.Random(7)


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_2xx_delivers(status: int) -> None:
    assert judge(1, status, {}, NOW, rng()).verdict is Verdict.DELIVERED


@pytest.mark.parametrize("status", [None, 301, 302, 307, 400, 401, 404, 429, 500, 503])
def test_everything_else_is_tried_again(status: int | None) -> None:
    assert judge(1, status, {}, NOW, rng()).verdict is Verdict.RETRY


def test_410_disables_at_once() -> None:
    assert judge(1, 410, {}, NOW, rng()).verdict is Verdict.DISABLED


def test_schedule_with_jitter() -> None:
    # Standard Webhooks: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h after attempts 1 to 9
    table = [5, 300, 1800, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600]
    for attempt, planned in enumerate(table, start=1):
        waits = [judge(attempt, 500, {}, NOW, random.Random(seed)).wait_s for seed in range(20)]
        assert all(wait is not None and planned <= wait <= planned * 1.2 for wait in waits)
        assert len(set(waits)) == 20
    assert MAX_ATTEMPTS == 10
    assert judge(10, 500, {}, NOW, rng()).verdict is Verdict.GIVEN_UP


def test_retry_after_lengthens_and_never_shortens() -> None:
    assert judge(1, 503, {"retry-after": "120"}, NOW, rng()).wait_s == 120.0
    date = email.utils.formatdate(NOW + 60, usegmt=True)
    assert judge(1, 429, {"retry-after": date}, NOW, rng()).wait_s == pytest.approx(60, abs=1)
    shortened = judge(2, 503, {"retry-after": "1"}, NOW, rng()).wait_s
    assert shortened is not None and shortened >= 300


@pytest.mark.parametrize("value", ["soon", "-5", "", "1e9", "Mon, 01 Jan 2026 00:00:00 +99999999999999999999"])
def test_a_retry_after_that_says_nothing_is_ignored(value: str) -> None:
    wait_s = judge(1, 503, {"retry-after": value}, NOW, rng()).wait_s
    assert wait_s is not None and wait_s <= 6.0


def test_retry_after_is_capped_at_a_day() -> None:
    assert judge(1, 503, {"retry-after": "99999999"}, NOW, rng()).wait_s == 86400.0
