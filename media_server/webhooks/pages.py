"""Pages of webhook lists, newest first."""

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from media_server.errors import InvalidRequest, NotFound


def place_after(table: sa.Table, after: str, load: Callable[[str], Any], what: str) -> sa.ColumnElement[bool]:
    """Say which rows of a table follow the one that `load` finds by the id `after`; `what` names it in the refusal.

    Raises InvalidRequest if `load` raises NotFound.
    """
    try:
        last = load(after)
    except NotFound as error:
        rule = f"the id of a {what}"
        message = f"after: must be {rule}; none has the id {after!r}."
        raise InvalidRequest(message, param="after", rule=rule, value=after) from error
    return sa.tuple_(table.c.created_at, table.c.id) < sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
