"""Doorbells: Celery messages that say no more than which pool to look into.

Source: Celery 5.7's settings, as they were tried for long GPU jobs. The message may be lost, come twice or come late:
`claim_next` decides what a worker does, and the sweeper rings again.
"""

import logging
from typing import Any

from celery import Celery

from media_server.settings import Settings

logger = logging.getLogger(__name__)

# nobody waits for a message this old: the sweeper has rung again
MESSAGE_EXPIRES_S = 60.0
# what a broker that accepts and never answers may cost the caller
RING_TIMEOUT_S = 2.5
KEY_PREFIX = "ms:celery:"


def make_celery(settings: Settings) -> Celery:
    """Make the Celery application that both sides of the doorbell use."""
    app = Celery("media_server", broker=settings.broker, set_as_current=False)
    app.conf.update(
        # the database keeps the job, so a message is done when it is taken
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_create_missing_queues=True,
        # a retry of ours is the sweeper's next ring
        task_publish_retry=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        broker_transport_options=_transport_options(settings),
    )
    return app


def ring(celery: Celery, pool: str) -> None:
    """Ring a pool's doorbell: never raises on a dead broker, never holds the caller beyond about 3 s."""
    # a connection of its own: the workers' wait for messages, which takes longer than a caller may be held
    options = {**celery.conf.broker_transport_options, "socket_timeout": RING_TIMEOUT_S}
    try:
        with celery.connection_for_write(transport_options=options) as connection:
            celery.send_task(
                "pool.wake",
                [pool],
                connection=connection,
                queue=f"pool.{pool}",
                expires=MESSAGE_EXPIRES_S,
                ignore_result=True,
                retry=False,
            )
    except Exception as error:
        # whatever the client library raises: the job is safe, only its start is later
        logger.warning("the doorbell of pool %s is silent (%s); the sweeper rings again", pool, type(error).__name__)


def _transport_options(settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "global_keyprefix": KEY_PREFIX,
        "socket_timeout": 10,
        "socket_connect_timeout": 3,
        "health_check_interval": 25,
        # the client's own retries would multiply the time that a dead broker holds a caller
        "max_retries": 0,
        "retry_on_timeout": False,
    }
    if settings.broker_url is not None:
        options["socket_keepalive"] = True
    return options
