"""What a reader makes of silence, by a clock of its own."""

import pytest

from media_server.text import reading
from media_server.text.messages import RequestMeta
from media_server.text.reading import GONE_S, OUTAGE_S, EngineUnavailable, Reading


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reading, "time", clock)
    return clock


@pytest.fixture
def reader(clock: Clock) -> Reading:
    return Reading("req_1", RequestMeta(engine="engine-0", instance="1", model="m", created=0))


def test_an_engine_that_says_nothing_has_gone(clock: Clock, reader: Reading) -> None:
    clock.now += GONE_S
    reader.take([])
    assert reader.check(None) is None
    clock.now += 0.1
    with pytest.raises(EngineUnavailable, match="went away"):
        reader.check(None)


def test_while_valkey_is_out_no_engine_is_missed(clock: Clock, reader: Reading) -> None:
    clock.now += OUTAGE_S
    reader.note_outage()
    # back, and empty: the engine has its time to say that it lives
    reader.take([])
    assert reader.check(None) is None
    clock.now += GONE_S
    reader.take([])
    assert reader.check(None) is None
    clock.now += 0.1
    with pytest.raises(EngineUnavailable, match="went away"):
        reader.check(None)


def test_an_outage_is_not_waited_for_for_ever(clock: Clock, reader: Reading) -> None:
    clock.now += OUTAGE_S + 0.1
    with pytest.raises(EngineUnavailable, match="broker"):
        reader.note_outage()
