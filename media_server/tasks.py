"""Ends tasks for certain: the Redis client may lose a cancellation.

It sends under `asyncio.wait_for`, which before Python 3.12 takes a cancellation that meets the end of what it waits for
for that end (github.com/python/cpython/issues/86296); the task then goes on as if nobody had asked.
"""

import asyncio
from typing import Any

_AGAIN_S = 0.2


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks until they have ended; what they raise is nobody's."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            # taken note of, or the loop would log it
            task.exception()
