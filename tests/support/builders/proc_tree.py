"""An artificial /proc, for processes that a test cannot start: of other users and namespaces, and in containers."""

from __future__ import annotations

from pathlib import Path


class Tree:
    """An artificial /proc. A namespace is a file; its inode is the namespace's number, and hard links share it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.namespace("own")
        self.process(1, name="init")
        (root / "self").symlink_to("1")

    def namespace(self, name: str) -> int:
        path = self.root / f"namespace-{name}"
        path.touch()
        return path.stat().st_ino

    def process(
        self,
        pid: int,
        *,
        start: int = 100,
        name: str = "python",
        cmdline: bytes = b"python\0train.py\0--token\0secret\0",
        uid: int = 0,
        cgroup: str = "0::/\n",
        namespace: str = "own",
        inner_pids: tuple[int, ...] = (),
        environ: bytes = b"",
        parent: int = 0,
        cpu: int = 0,
    ) -> Path:
        directory = self.root / str(pid)
        (directory / "ns").mkdir(parents=True)
        numbers = " ".join(str(number) for number in (pid, *inner_pids))
        fields = " ".join(["0"] * 9 + [str(cpu)] + ["0"] * 7)
        (directory / "stat").write_text(f"{pid} ({name}) S {parent} {fields} {start} 0 0 0 0 0 0\n")
        uids = f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}"
        (directory / "status").write_text(f"Name:\t{name}\n{uids}\nNSpid:\t{numbers}\n", newline="")
        (directory / "cmdline").write_bytes(cmdline)
        (directory / "environ").write_bytes(environ)
        (directory / "comm").write_text(f"{name}\n")
        (directory / "cgroup").write_text(cgroup)
        (directory / "ns/pid").hardlink_to(self.root / f"namespace-{namespace}")
        return directory

    def hide(self, pid: int, *names: str) -> None:
        """Create a file that even root cannot read: a directory, which cannot be read as a file."""
        for name in names:
            (self.root / str(pid) / name).unlink()
            (self.root / str(pid) / name).mkdir()
