"""/v1/models: what is loaded, by the cards that workers publish."""

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from media_server import http_objects as objects
from media_server.auth import Owner
from media_server.errors import NotFound
from media_server.http_openapi import errors
from media_server.http_views import list_page
from media_server.models.registry import Published, list_cards

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_model=objects.ListPage[objects.Model], summary="List models")
async def list_models(request: Request, owner: Owner) -> dict[str, object]:
    """List the models, those loaded first at the head: the first of a kind is its default."""
    found = await run_in_threadpool(list_cards, request.app.state.db)
    return list_page([_model(published) for published in found], has_more=False)


@router.get("/{model:path}", response_model=objects.Model, summary="Retrieve a model", responses=errors(404))
async def retrieve_model(
    request: Request, owner: Owner, model: Annotated[str, Path(max_length=200, description="Its name.")]
) -> objects.Model:
    """Say what is known of a model: its rules, defaults, limits and licence."""
    found = await run_in_threadpool(list_cards, request.app.state.db)
    for published in found:
        if published.card.name == model:
            return _model(published)
    names = ", ".join(published.card.name for published in found) or "none yet"
    raise NotFound(
        f"No model is named {model!r}; there are: {names}.",
        code="model_not_found",
        param="model",
        rule=f"one of {names}",
        value=model,
    )


def _model(published: Published) -> objects.Model:
    return objects.Model(
        id=published.card.name,
        object="model",
        created=int(published.published_at),
        owned_by="media-server",
        kind=published.card.kind,
        is_ready=published.is_live,
        card=published.card.model_dump(mode="json"),
    )
