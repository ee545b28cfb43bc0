"""Jobs without the package report through the client that the exporter puts into a folder of the node."""

from __future__ import annotations

import shutil
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.programs import Program
from tests.support.builders.pod_shapes import SHAPES, answered
from tests.support.paths import REPOSITORY
from tests.support.processes.injected_scripts import MIB, StartScript, start_script
from tests.support.processes.namespaces import CONTAINER, needs_namespaces
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for

__all__ = ["start_script"]

WITHOUT_PACKAGE = "import importlib.util\nassert importlib.util.find_spec('gpumem_client') is None\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with torch and without this project."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(site, "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return str(folder / "bin" / "python")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of the socket and of the client, as /run/gpumem."""
    folder = tmp_path / "gpumem"
    folder.mkdir()
    return folder


@pytest.fixture
def serving(node: EmulatedNode, run_folder: Path) -> Iterator[ExporterProcess]:
    exporter = ExporterProcess(run_folder, *flags(run_folder), environment=node.environment())
    yield exporter
    exporter.close()


def flags(run_folder: Path) -> tuple[str, ...]:
    return (*QUICK, "--client.directory", str(run_folder / "client"))


def allocated_by_workload(exporter: ExporterProcess) -> dict[str, tuple[int, str]]:
    """Return the allocated bytes and the client's version of each reporting process."""
    return {
        process["workload"]: (process["devices"][0]["allocated_bytes"], process["client_version"])
        for process in exporter.processes().values()
        if process["devices"]
    }


@needs_namespaces
def test_a_container_needs_the_mount_and_the_variables_of_the_webhook(
    serving: ExporterProcess, start_script: StartScript, run_folder: Path, python: str
) -> None:
    pod, _ = answered(SHAPES["statefulset"].pod, host_path=str(run_folder))
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    source, target = volume["hostPath"]["path"], mount["mountPath"]
    # Its own mounts, with the node's folder read-only, and nothing else of this project.
    mounts = (
        f"mount -t tmpfs none /run && mkdir {target} && mount --bind {source} {target} && "
        f'mount -o remount,ro,bind {target} && mount -t tmpfs none {REPOSITORY / "client"} && exec "$@"'
    )
    job = start_script(
        WITHOUT_PACKAGE + "hold(3)\nsay(os.getpid())\nwait()",
        injected=False,
        command=(*CONTAINER, "--mount", "sh", "-c", mounts, "sh", python),
        **{variable["name"]: variable["value"] for variable in container["env"]},
    )
    assert job.heard() == 1, job.stderr()
    wait_for(lambda: allocated_by_workload(serving).get("notebook", (0,))[0] == 3 * MIB, "the container's report")
    (process,) = serving.processes().values()
    assert (process["own_pid"], process["rank"]) == (1, "12")
    cleared = serving.act("empty_cache", target={"workload": "notebook"}, wait_seconds=10)
    assert [result["outcome"] for result in cleared["results"]] == ["done"]
    job.go()
    assert job.finish() == 0
    assert job.stderr() == ""


def test_jobs_go_on_reporting_while_the_client_is_upgraded(
    serving: ExporterProcess,
    node: EmulatedNode,
    start_script: StartScript,
    run_folder: Path,
    python: str,
    tmp_path: Path,
) -> None:
    def start(name: str, code: str) -> Program:
        return start_script(
            WITHOUT_PACKAGE + code,
            injected=False,
            command=(python,),
            PYTHONPATH=str(run_folder / "client"),
            GPUMEM_EXPORTER_URL=serving.url,
            GPUMEM_WORKLOAD=name,
        )

    # A module that the client imports only when the job uses it.
    lazy = "import gpumem_client\nsay(bool(str(gpumem_client.memory_summary())))\nwait()"
    running = start("running", f"hold(1)\nsay(0)\nwait()\n{lazy}")
    waiting = start("waiting", "import torch\nsay(0)\nwait()\nhold(2)\nwait()")
    assert running.heard() == waiting.heard() == 0
    wait_for(lambda: set(allocated_by_workload(serving)) == {"running"}, "the first report")
    version = allocated_by_workload(serving)["running"][1]

    newer = shutil.copytree(REPOSITORY / "client" / "gpumem_client", tmp_path / "newer" / "gpumem_client")
    text = (newer / "__init__.py").read_text()
    (newer / "__init__.py").write_text(text.replace(f'__version__ = "{version}"', '__version__ = "9.9.9"'))
    serving.close()
    environment = node.environment({"PYTHONPATH": str(newer.parent)})
    upgraded = ExporterProcess(run_folder, *flags(run_folder), environment=environment, fresh=True)
    try:
        waiting.go()
        running.go()
        assert running.heard() is True, running.stderr()
        later = start("later", "hold(4)\nwait()")
        expected = {"running": (MIB, version), "waiting": (2 * MIB, version), "later": (4 * MIB, "9.9.9")}
        wait_for(lambda: allocated_by_workload(upgraded) == expected, "reports of every job", 30)
        for job in (running, waiting, later):
            job.go()
            assert (job.finish(), job.stderr()) == (0, "")
    finally:
        upgraded.close()


def test_run_below_the_folder_of_the_node_reports_once(
    serving: ExporterProcess, start_script: StartScript, run_folder: Path
) -> None:
    job = start_script(
        "hold(1)\nsay(threads())\nwait()", PYTHONPATH=str(run_folder / "client"), GPUMEM_EXPORTER_URL=serving.url
    )
    assert job.heard() == ["gpumem-reporter"]
    serving.wait_for_processes(job.pid)
    job.go()
    assert (job.finish(), job.stderr()) == (0, "")
