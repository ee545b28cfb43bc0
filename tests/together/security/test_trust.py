"""Which servers receive a token, a report or the right to command: real users, real sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError, ExporterUntrustedError
from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.peer import user_name
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.edge.listeners import BindError, bind
from tests.emulation.fixtures import StartTorch
from tests.support.processes.other_user import OTHER_UID, RogueServer, needs_root, rogue_server
from tests.support.waiting import patient, wait_for

TOKEN = {"Authorization": "Bearer secret"}

pytestmark = needs_root


@pytest.fixture
def rogue(tmp_path: Path) -> Iterator[RogueServer]:
    with rogue_server(tmp_path) as server:
        yield server


def post(url: str, trust: Trust | None = None) -> Answer:
    with contextlib.closing(Connection(url, timeout_seconds=patient(10), trust=trust)) as connection:
        return connection.request("POST", "/api/v1/actions", b"{}", TOKEN)


def test_a_server_of_another_user_on_the_port_receives_no_token(rogue: RogueServer) -> None:
    with pytest.raises(ExporterUntrustedError, match=f"uid {OTHER_UID}"):
        post(rogue.url)
    assert rogue.received() == b""
    with contextlib.closing(Connection(rogue.url, timeout_seconds=patient(10))) as connection:
        assert connection.request("GET", "/metrics").status == 200, "a request without a secret needs no trust"
    assert b"GET /metrics" in rogue.received()


def test_a_password_in_the_url_is_a_secret(rogue: RogueServer) -> None:
    url = rogue.url.replace("http://", "http://ada:secret@")
    with (
        contextlib.closing(Connection(url, timeout_seconds=patient(10))) as connection,
        pytest.raises(ExporterUntrustedError),
    ):
        connection.request("GET", "/metrics")
    assert rogue.received() == b""


def test_the_user_of_the_exporter_can_be_named(rogue: RogueServer) -> None:
    assert post(rogue.url, Trust.from_environment({"GPUMEM_EXPORTER_USER": str(OTHER_UID)})).status == 200
    with pytest.raises(ConfigurationError, match="GPUMEM_EXPORTER_USER"):
        Trust.from_environment({"GPUMEM_EXPORTER_USER": "no-such-user"})
    assert Trust.from_environment({"GPUMEM_EXPORTER_USER": "root"}).uids == {0}


@pytest.fixture
def root_folder() -> Iterator[Path]:
    """A folder in one where only root may write, as /run is."""
    folder = Path(tempfile.mkdtemp(prefix="gpumem-test-", dir="/run"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("mode", "accepted"), [(0o755, True), (0o775, False), (0o777, False)])
def test_a_socket_is_trusted_in_a_folder_that_root_gave_to_its_user(
    root_folder: Path, tmp_path: Path, mode: int, accepted: bool
) -> None:
    folder = root_folder / "gpumem"
    folder.mkdir()
    os.chown(folder, OTHER_UID, OTHER_UID)
    folder.chmod(mode)
    with rogue_server(tmp_path, folder / "exporter.sock") as server:
        if accepted:
            assert post(server.url).status == 200
        else:
            with pytest.raises(ExporterUntrustedError):
                post(server.url)
            assert server.received() == b""


@pytest.fixture
def own_folder(root_folder: Path) -> Path:
    """A folder of the other user, in one where every user may create folders, as /tmp is."""
    shared = root_folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    folder = shared / "own"
    folder.mkdir()
    os.chown(folder, OTHER_UID, OTHER_UID)
    return folder


def test_a_socket_in_a_folder_that_its_user_created_is_not_trusted(own_folder: Path, tmp_path: Path) -> None:
    with rogue_server(tmp_path, own_folder / "exporter.sock") as server, pytest.raises(ExporterUntrustedError):
        post(server.url)
    assert server.received() == b""


def test_a_link_to_a_folder_of_another_user_does_not_make_it_trusted(
    root_folder: Path, own_folder: Path, tmp_path: Path
) -> None:
    (root_folder / "gpumem").symlink_to(own_folder)
    with rogue_server(tmp_path, own_folder / "exporter.sock"), pytest.raises(ExporterUntrustedError):
        post(f"unix://{root_folder}/gpumem/exporter.sock")


def test_a_reporter_sends_nothing_to_a_server_of_another_user_and_says_so_once(
    rogue: RogueServer, start_torch: StartTorch
) -> None:
    process = start_torch(GPUMEM_EXPORTER_URL=rogue.url, GPUMEM_REPORT_TOKEN="secret")
    process.exec("import gpumem_client as client; client.start(); torch.zeros(1, device='cuda')")
    wait_for(lambda: "is not trusted" in process.stderr(), "the log line")
    wait_for(lambda: rogue.connected() > 2, "further attempts")
    assert process.stderr().count("is not trusted") == 1
    assert rogue.received() == b""


def test_a_taken_address_names_the_user(tmp_path: Path) -> None:
    user = user_name(OTHER_UID)
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chown(made, OTHER_UID, OTHER_UID)
        path = Path(made, "exporter.sock")
        with rogue_server(tmp_path, path), pytest.raises(BindError, match=f"pid [0-9]+ of {user}"):
            bind([], str(path))
    with rogue_server(tmp_path) as server:
        address = server.url.removeprefix("http://")
        for taken in (address, address.replace("127.0.0.1", "")):
            with pytest.raises(BindError, match=f"a process of {user}"):
                bind([taken])


def test_a_token_is_for_actions_at_a_trusted_exporter(tmp_path: Path) -> None:
    with rogue_server(tmp_path) as server, ExporterApi((server.url,), token="secret", token_for_reads=False) as api:
        api.get("/api/v1/devices")
        with pytest.raises(ExporterUntrustedError, match=f"uid {OTHER_UID}"):
            api.submit({"action": "empty_cache", "target": {"all": True}})
        assert b"/api/v1/devices" in server.received()
        assert b"secret" not in server.received()
