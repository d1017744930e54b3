"""Tasks that lose a cancellation end all the same."""

import asyncio

from media_server.tasks import end_tasks


def test_a_lost_cancellation_is_said_again() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 2:
                    raise

    async def failing() -> None:
        raise ValueError("nobody's")

    async def run() -> tuple[bool, bool]:
        tasks = asyncio.create_task(deaf()), asyncio.create_task(failing())
        await asyncio.sleep(0)
        await end_tasks(*tasks)
        await end_tasks()
        return tasks[0].cancelled(), tasks[1].done()

    assert asyncio.run(run()) == (True, True)
    assert lost == 3
