"""Names of processes on the metrics page, in JSON documents and in the targets of actions.

A name always identifies one process. The rules:

- The name of a reporter with a known host pid is that pid. If two reporters have the same host pid, the pid was reused
  and the first reporter has not expired yet. The reporter of the last report gets the name, and the other is left out.
  A reporter is also left out if the host shows that its pid belongs to a process that started later.
- The pid of a reporter without a known host pid is only its claim, in a PID namespace that it claims too. Its name is
  `pid@namespace:uid`, or `pid@namespace` if only a token vouches for it. In a container that the exporter sees, the
  container follows: `pid@namespace:uid:container`. The name depends on no other process, so no report of another user
  changes it, hides the process or continues its series.

A name is text on the metrics page. In JSON it is a number if possible: 4711, or "1@4026532007".
"""

from __future__ import annotations

from gpumem_exporter.core.container import Place

# The start of the titles of Ray's workers.
_RAY = "ray::"


def reporter_name(host_pid: int | None, namespace: int, pid: int, owner_uid: int | None, place: Place) -> str:
    """Return the name of a reporter."""
    if host_pid is not None:
        return str(host_pid)
    if owner_uid is None:
        return f"{pid}@{namespace}"
    return f"{pid}@{namespace}:{owner_uid}" + (f":{place}" if place.container else "")


def command_of(host_command: str, reported_command: str) -> str:
    """Return the command of a process: the host's description, if there is one, otherwise the reported one."""
    # Ray sets the title of an actor's process to its class and method. Only the reporter knows which actor it is.
    if reported_command.startswith(_RAY) and host_command.startswith(_RAY):
        return reported_command
    return host_command or reported_command


def pid_order(pid: str) -> tuple[int, int, int, str]:
    """Return a sort key for a name: by pid, then a plain pid before `pid@namespace`, then by user and container."""
    number, at, rest = pid.partition("@")
    if not at:
        return int(number), -1, -1, ""
    namespace, _, owner = rest.partition(":")
    owner_uid, _, container = owner.partition(":")
    return int(number), int(namespace), int(owner_uid or -1), container


def json_pid(pid: str) -> int | str:
    """Return a name as a JSON value: a number if possible."""
    return int(pid) if pid.isdecimal() else pid
