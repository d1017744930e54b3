"""API keys as the API takes and gives them.

Times are whole unix seconds.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from media_server.keys import ApiKey, Scope
from media_server.limits import KeyLimits
from media_server.validation import RequestModel

_ID = "0192f0c1a5b07cc2a3f44b6f1d2e3c4d"


class KeyBody(RequestModel):
    """A key to be made."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={
            "examples": [
                {
                    "name": "studio",
                    "scopes": ["submit", "read"],
                    "limits": {
                        "queued_jobs": 100,
                        "text_streams": 4,
                        "budgets": [{"kind": "gpu_seconds", "amount": 36000, "per": "month"}],
                    },
                }
            ]
        },
    )

    name: str = Field(min_length=1, max_length=100, description="Another one for each key that is valid.")
    scopes: list[Scope] = Field(["submit", "read"], min_length=1, description="What it may do.")
    limits: KeyLimits = Field(KeyLimits(), description="What it may use; what is left out is not limited.")
    lifetime_s: float | None = Field(
        None, gt=0, le=3.2e9, description="How long it is valid, in seconds; for ever if left out."
    )


class LimitsBody(RequestModel):
    """What a key may use from now on."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"limits": {"queued_jobs": 200}}]})

    limits: KeyLimits = Field(
        description="All of them anew: what is left out is not limited any more, but `zero_retention` stays."
    )


class Key(BaseModel):
    """An API key, without the key itself."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": f"key_{_ID}",
                    "object": "key",
                    "name": "studio",
                    "prefix": "msk_abcdefghij",
                    "scopes": ["read", "submit"],
                    "limits": {
                        "queued_jobs": 100,
                        "text_streams": None,
                        "work_per_day": None,
                        "storage_bytes": None,
                        "budgets": [],
                        "zero_retention": False,
                    },
                    "created_at": 1764400000,
                    "last_used_at": None,
                    "expires_at": None,
                    "revoked_at": None,
                }
            ]
        }
    )

    id: str
    object: Literal["key"]
    name: str
    prefix: str = Field(description="How the key begins; it names the key too.")
    scopes: list[Scope]
    limits: KeyLimits
    created_at: int
    last_used_at: int | None = Field(description="To the minute.")
    expires_at: int | None
    revoked_at: int | None


class KeyWithSecret(Key):
    """An API key as it is made."""

    model_config = ConfigDict(json_schema_extra={"examples": []})

    key: str = Field(description="The key itself. It is kept nowhere: no other answer tells it.")


BODIES: list[type[BaseModel]] = [KeyBody, LimitsBody]


def key_object(key: ApiKey) -> Key:
    """Describe a key."""
    return Key(
        id=key.id,
        object="key",
        name=key.name,
        prefix=key.prefix,
        scopes=sorted(key.scopes),
        limits=key.limits,
        created_at=int(key.created_at),
        last_used_at=_whole(key.last_used_at),
        expires_at=_whole(key.expires_at),
        revoked_at=_whole(key.revoked_at),
    )


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)
