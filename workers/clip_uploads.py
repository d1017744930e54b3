"""What one claim writes into the store, in a thread of its own, so that its lease is beaten meanwhile.

Invariant: once it is settled, abandoned or closed, nothing of it is written any more.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from workers.leases import beat_meanwhile

T = TypeVar("T")


class Uploads:
    """The thread, and what it was given; lives as long as its claim."""

    def __init__(self) -> None:
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._given: list[Future[Any]] = []

    def begin(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Have the thread write something, after what it was given before."""
        upload = self._helper.submit(work, *arguments)
        self._given.append(upload)
        return upload

    def meanwhile(self, work: Callable[[], T], tick: Callable[[], None]) -> T:
        """Do something long in the thread, after what it was given before, and call `tick` meanwhile."""
        return beat_meanwhile(self._helper, work, tick)

    def finish(self, tick: Callable[[], None]) -> None:
        """Wait until all is written, and call `tick` meanwhile. Raises what went wrong."""
        for upload in list(self._given):
            self.meanwhile(upload.result, tick)

    def settle(self, *, keeps_waiting: bool, goes_on: Callable[[], bool]) -> int:
        """Wait for what is being written, and for what waits if that is kept, as long as `goes_on` says so.

        Returns how many have failed.
        """
        if not keeps_waiting:
            self._drop_waiting()
        while waiting := wait_for(self._given, timeout=0.1).not_done:
            if not goes_on():
                for upload in waiting:
                    upload.cancel()
                return 0
        return sum(not upload.cancelled() and upload.exception() is not None for upload in self._given)

    def abandon(self) -> None:
        """Drop what waits, and wait for what is being written."""
        self._drop_waiting()
        wait_for(self._given)

    def close(self) -> None:
        """End the thread, after what it is writing."""
        self._helper.shutdown(wait=True, cancel_futures=True)

    def _drop_waiting(self) -> None:
        for upload in self._given:
            upload.cancel()
