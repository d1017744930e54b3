"""Whoever starts the service, alone or whole: on an address that others reach only with a valid key."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from media_server import serve
from media_server.errors import ConfigurationError
from media_server.jobs.database import open_database
from media_server.keys import create_key
from media_server.settings import Settings
from workers import supervisor


@pytest.mark.parametrize("main", [serve.main, supervisor.main])
def test_it_does_not_start_without_a_key(
    main: Callable[[Sequence[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIA_SERVER_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: started.append("api"))
    monkeypatch.setattr("workers.supervisor.Supervisor.run", lambda *_: started.append("all"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    started: list[str] = []
    arguments = ["--host", "0.0.0.0", "--port", "0"]
    with pytest.raises(ConfigurationError, match="media-server keys create") as refused:
        main(arguments)
    assert refused.value.value == "0.0.0.0" and started == []
    main(["--host", "127.0.0.1", "--port", "0"])
    db = open_database(Settings(data_dir=tmp_path).database)
    create_key(db, "studio")
    db.close()
    main(arguments)
    assert len(started) == 2
