"""Settings of the service, and the only reader of the environment.

Order of precedence: defaults, the TOML file, MEDIA_SERVER_* variables, overrides. Unknown keys are refused.
A parent process hands its settings to a child whole, in one variable, so that both always agree.
"""

import base64
import binascii
import hashlib
import importlib.resources
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from media_server.errors import ConfigurationError

CONFIG_VERSION = 1
_PREFIX = "MEDIA_SERVER_"
_WHOLE = "MEDIA_SERVER_SETTINGS"
_CONFIG = "MEDIA_SERVER_CONFIG"
# never repeated in an error
_SECRET = frozenset({"api_key", "engine_api_key", "webhook_secret", "database_url", "broker_url", "otlp_headers"})
# unix sockets take 107 bytes; the runtime folder keeps room for the names inside it
_MAX_RUNTIME_PATH = 72


def _from_json(value: object) -> object:
    if isinstance(value, str) and value[:1] in "[{":
        return json.loads(value)
    return value


def _gpu_list(value: object) -> object:
    """Read "0,1", "cpu" (no GPU) or "auto" (find them)."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return None
        if text in ("", "cpu", "none"):
            return []
        return json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",")]
    return value


class ModelEntry(BaseModel):
    """A model that a worker of this machine loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    kind: Literal["video", "text"]
    path: str | None = None
    pool: str | None = None

    @property
    def pool_name(self) -> str:
        """The pool whose jobs its workers take: its own, or the one named after its kind."""
        return self.pool or self.kind


DEFAULT_MODELS = (
    ModelEntry(name="tiny-wan", kind="video"),
    ModelEntry(name="smollm2-135m-instruct", kind="text"),
)


class Settings(BaseModel):
    """Everything that can be configured; frozen, passed explicitly."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # where the service listens, and where the command line finds it
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    url: str | None = None
    # the key that the command line sends; keys that open the service are made by `media-server keys create`
    api_key: str | None = None

    # where its parts live; None is the embedded one
    data_dir: Path = Path("~/.local/share/media-server")
    database_url: str | None = None
    broker_url: str | None = None
    artifacts_url: str | None = None
    # whether files are fetched from the object store itself, by addresses that it signs for a few minutes
    redirect_downloads: bool = False
    engine_url: str | None = None
    engine_api_key: str | None = None

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = False
    # whether /metrics is shown to whoever reaches the service, without a key
    metrics_open: bool = False
    # OpenTelemetry: a collector's address such as http://localhost:4318 (extra `tracing`), headers that it wants, and
    # the share of requests without a trace of their caller's that is traced
    otlp_url: str | None = None
    otlp_headers: Annotated[dict[str, str], BeforeValidator(_from_json)] = {}
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0

    # models, and the devices that carry them; gpus None: those nvidia-smi lists, (): the CPU
    models: Annotated[tuple[ModelEntry, ...], BeforeValidator(_from_json)] = DEFAULT_MODELS
    gpus: Annotated[tuple[int, ...] | None, BeforeValidator(_gpu_list)] = None
    gpu_pools: Annotated[dict[int, str], BeforeValidator(_from_json)] = {}
    # of the text engines, cpu or cuda:N; None: the CPU where video models own the GPUs, else the first GPU
    engine_device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] | None = None
    video_threads: Annotated[int, Field(ge=1)] | None = None
    engine_threads: Annotated[int, Field(ge=1)] | None = None
    # text engines: the same answer to the bit whatever else is answered, at a price (llm/invariant.py has figures), and
    # a second try at answers that repeat themselves without end, for requests that do not decline it
    invariant: bool = False
    collapse_guard: bool = True

    # leases and their care, by the database's clock
    lease_s: Annotated[float, Field(gt=0)] = 20.0
    beat_s: Annotated[float, Field(gt=0)] = 5.0
    sweep_s: Annotated[float, Field(gt=0)] = 5.0
    doorbell_s: Annotated[float, Field(gt=0)] = 10.0
    # files that nothing owns are removed when they are so old; the store is walked through as often
    stray_s: Annotated[float, Field(gt=0)] = 3600.0
    max_attempts: Annotated[int, Field(ge=1)] = 3
    cancel_grace_s: Annotated[float, Field(ge=0)] = 5.0
    shot_retries: Annotated[int, Field(ge=0)] = 2
    # how long a text stream can be taken up again
    resume_s: Annotated[float, Field(gt=0)] = 300.0
    # how long a finished job and its files are kept; None: until deleted
    retention_s: Annotated[float, Field(gt=0)] | None = None
    # zero data retention, of every request or of a key's: prompts are erased with the end of their job, and an answer
    # that is text (a storyboard) `answer_s` after it; jobs/words.py says what that means
    zero_retention: bool = False
    answer_s: Annotated[float, Field(ge=0)] = 60.0

    # admission, None for no limit: the predicted GPU seconds of one clip, the predicted wait of a new job, and how many
    # jobs of one owner may wait in a pool
    max_clip_cost_s: Annotated[float, Field(gt=0)] | None = 6 * 3600.0
    max_queue_wait_s: Annotated[float, Field(gt=0)] | None = 24 * 3600.0
    max_queue_jobs: Annotated[int, Field(ge=1)] | None = 1000
    # new jobs are refused (507) while a disk that is written to has less than this left; 0: never
    min_free_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    # a file beside SQLite's database that is given up when the disk is full, so that deleting still works; 0: none
    reserve_bytes: Annotated[int, Field(ge=0)] = 16 << 20
    # how long the bare row of a deleted job is kept before it goes too; its ledger stays
    keep_deleted_s: Annotated[float, Field(ge=0)] = 7 * 86400.0

    # lines of one batch at most, and how many of one owner are under way at a time: the rest of the service is for
    # those who wait for an answer
    max_batch_lines: Annotated[int, Field(ge=1)] = 50_000
    batch_lines_at_once: Annotated[int, Field(ge=1)] = 4

    max_body_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    max_upload_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    # signs the messages to a request's own webhook_url; None: made once and kept in data_dir/webhook-secret
    webhook_secret: str | None = None
    # http and private addresses for inputs and webhooks: for tests and closed networks
    allow_private_urls: bool = False

    @field_validator("data_dir", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        # Path("") is the folder that the process happens to stand in
        if value == "":
            raise ValueError("must name a folder")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @field_validator("models")
    @classmethod
    def _unique(cls, value: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
        names = [entry.name for entry in value]
        if len(set(names)) != len(names):
            raise ValueError(f"each model has a name of its own, got {names}")
        pools: dict[str, str] = {}
        for entry in value:
            if entry.kind != "video":
                continue
            if (other := pools.setdefault(entry.pool_name, entry.name)) != entry.name:
                raise ValueError(
                    f"each video model has a pool of its own, since its workers load one model: "
                    f"{other} and {entry.name} both have {entry.pool_name!r}; give one of them another pool"
                )
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _signs(cls, value: str | None) -> str | None:
        if value is None:
            return None
        # the rule of webhooks.signing: Standard Webhooks' secrets
        prefix, text = value[:6], value[6:]
        try:
            key = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if prefix != "whsec_" or not 24 <= len(key) <= 64:
            raise ValueError("must be whsec_ and the base64 of 24 to 64 random bytes")
        return value

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{self.data_dir / 'media-server.db'}"

    @property
    def artifacts(self) -> str:
        """URL, or path of the folder, that artifacts are written to."""
        return self.artifacts_url or str(self.data_dir / "artifacts")

    @property
    def runtime_path(self) -> Path:
        """Where `runtime_dir` is, or would be."""
        name = f"media-server-{os.getuid()}-{hashlib.sha256(bytes(self.data_dir)).hexdigest()[:8]}"
        path = Path(tempfile.gettempdir()) / name
        return path if len(bytes(path)) <= _MAX_RUNTIME_PATH else Path("/tmp") / name

    @property
    def runtime_dir(self) -> Path:
        """Folder for sockets and locks, made on first use: short, 0700, one for each user and data folder.

        Raises ConfigurationError if the folder exists and is not ours alone.
        """
        return _own_folder(self.runtime_path)

    @property
    def gpu_lock_dir(self) -> Path:
        """Folder for the locks of GPUs, which all services of this user share; made on first use.

        Raises ConfigurationError if the folder exists and is not ours alone.
        """
        return _own_folder(Path(tempfile.gettempdir()) / f"media-server-{os.getuid()}-gpus")

    @property
    def valkey_socket(self) -> Path:
        """Unix socket of the embedded Valkey."""
        return self.runtime_dir / "valkey.sock"

    @property
    def broker(self) -> str:
        """Broker URL as Celery writes it; a certificate is verified unless the URL says otherwise, as redis-py does."""
        if self.broker_url is None:
            return f"redis+socket://{self.valkey_socket}"
        # left alone, Celery's client takes any certificate, and sends it the password
        if self.broker_url.startswith("rediss://") and "ssl_cert_reqs=" not in self.broker_url:
            return f"{self.broker_url}{'&' if '?' in self.broker_url else '?'}ssl_cert_reqs=required"
        return self.broker_url

    @property
    def redis_url(self) -> str:
        """Broker URL as redis-py writes it."""
        return self.broker_url or f"unix://{self.valkey_socket}"

    def assets_dir(self) -> Path:
        """Folder of the embedded weights, cards and prompts."""
        return Path(str(importlib.resources.files("media_server_assets")))

    def model_path(self, entry: ModelEntry) -> Path:
        """Folder that a model is loaded from: its own, or that of the embedded model of its kind."""
        if entry.path is not None:
            return Path(entry.path).expanduser()
        return self.assets_dir() / "tiny_wan" if entry.kind == "video" else self.data_dir / "models" / entry.name


def _own_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise ConfigurationError(
            "The runtime folder must be a folder of this user with mode 0700.", param="runtime_dir", value=path.name
        )
    return path


def load_settings(config: Path | None = None, **overrides: Any) -> Settings:
    """Read the settings of this process; overrides that are not None win.

    Raises ConfigurationError if a key is unknown, a value breaks its rule or the file's version is another.
    """
    whole = os.environ.get(_WHOLE)
    if whole is not None and config is None:
        values = json.loads(whole)
    else:
        values = {**_read_file(config), **_read_environment(os.environ)}
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        got = "a value that is not shown" if name in _SECRET else repr(first["input"])
        # a secret would stand in the trace of the error that this one comes from
        cause = None if name in _SECRET else error
        raise ConfigurationError(
            f"Setting {name}: {first['msg']}, got {got}.", param=name, rule=first["msg"]
        ) from cause


def crash_point() -> tuple[str | None, str | None]:
    """Read MEDIA_SERVER_TEST_CRASH_AT: the name of a crash point, and the file that says that it was met."""
    name, _, file = os.environ.get(f"{_PREFIX}TEST_CRASH_AT", "").partition("=")
    return name or None, file or None


def visible_gpus() -> list[str] | None:
    """Read CUDA_VISIBLE_DEVICES: indices or UUIDs of the GPUs that this process is to see; None: all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",")]


def stand_in_program() -> str | None:
    """Read MEDIA_SERVER_TEST_GPU_PROGRAM: a Python file that takes the GPU program's place under test."""
    return os.environ.get(f"{_PREFIX}TEST_GPU_PROGRAM") or None


def child_environment(settings: Settings) -> dict[str, str]:
    """Give the whole environment of a child process whose `load_settings()` must return equal settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIX) or name.startswith(f"{_PREFIX}TEST_")
    }
    # CUDA's own order, the fastest first, is not the order of nvidia-smi, by which GPUs are told apart
    return {**inherited, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", _WHOLE: settings.model_dump_json()}


def _read_file(config: Path | None) -> dict[str, Any]:
    named = os.environ.get(_CONFIG)
    path = config or (Path(named) if named else None)
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}") from error
    version = values.pop("version", None)
    if version != CONFIG_VERSION:
        raise ConfigurationError(
            f"The configuration file must say version = {CONFIG_VERSION}, got {version!r}.",
            param="version",
            value=version,
        )
    if isinstance(gpus := values.get("gpus"), list) and any(isinstance(gpu, dict) for gpu in gpus):
        values["gpus"], values["gpu_pools"] = _read_gpus(gpus)
    if values.get("data_dir"):
        # a relative folder is meant from where the file stands
        values["data_dir"] = path.absolute().parent / Path(values["data_dir"]).expanduser()
    return values


def _read_gpus(tables: list[Any]) -> tuple[list[int], dict[int, str]]:
    """Read `[[gpus]]` tables of `index` and, optionally, `pool`."""
    pools: dict[int, str] = {}
    for table in tables:
        if not isinstance(table, dict) or "index" not in table or set(table) - {"index", "pool"}:
            raise ConfigurationError("Each [[gpus]] has index and optionally pool.", param="gpus", value=table)
        if "pool" in table:
            pools[table["index"]] = table["pool"]
    return [table["index"] for table in tables], pools


def _read_environment(environment: Mapping[str, str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or variable in (_WHOLE, _CONFIG):
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if name.startswith("test_"):
            continue
        if name not in Settings.model_fields:
            raise ConfigurationError(f"{variable} is not a setting of this release.", param=variable)
        values[name] = None if text == "" and name != "gpus" else text
    return values
