"""How several processes find each other: who is who, and that all have come, before jax starts.

jax waits in silence for 300 seconds and then ends the process, whatever is wrong. So the processes
meet before, at the same address: the first one listens there, each says who it is, and all of them
get the same answer. Their connections stay open: the death of a process breaks its connection.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # jax's
START_TIMEOUT = "JAXRL_LLM_START_TIMEOUT_S"
START_TIMEOUT_S = 300  # until all processes have come; jax's own
GREETING = {"jaxrl_llm": "waits for its processes"}
FIRST_WORD_S, WORD_S = 5.0, 60.0  # until it is said what is waited for, and said again
STRANGER_S = 10.0  # for a run before that is about to end
TALK_S = 5.0  # for a line from the other side
LONGEST_LINE = 2**16


class Membership(NamedTuple):
    """Where the first process listens, how many there are, and which of them this is."""

    address: str
    total: int
    number: int

    def __str__(self) -> str:
        """Name this process in an error."""
        return f"process {self.number} of {self.total} at {self.address}"


class Link(NamedTuple):
    """A connection between this process and another one.

    Attributes:
        connection: that breaks when the other process ends.
        name: the other's PID and host.
    """

    connection: socket.socket
    name: str


def find_membership(environment: Mapping[str, str]) -> Membership | None:
    """Find out which of several processes this is, from its environment.

    That is `JAX_COORDINATOR_ADDRESS` (host:port of the first process), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, or else what Slurm tells each task of a job step with several tasks.
    jax's own detection reads only the first of these, and gives a Slurm task one device, not all.

    Args:
        environment: Variables by name.

    Returns:
        The membership, or None where nothing says that there are several processes.

    Raises:
        ValueError: Only some of the variables are set, or they contradict each other.

    >>> find_membership({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7",
    ...                  "SLURM_STEP_NODELIST": "gpu[03-06],x1"})
    Membership(address='gpu03:61447', total=4, number=1)
    """
    given = [name for name in VARIABLES if environment.get(name)]
    if not given and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        first_node = re.match(r"([^,\[]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])
        assert first_node is not None, "Slurm names at least one node"
        port = 61440 + int(environment["SLURM_JOB_ID"]) % 4096
        total, number = (environment[name] for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
        return Membership(f"{first_node[1]}{first_node[2] or ''}:{port}", int(total), int(number))
    if not given:
        return None
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ValueError(
            f"{', '.join(given)} set without {', '.join(missing)}: set all three in every process, "
            "or none of them to run in one process"
        )
    address, total, number = (environment[name] for name in VARIABLES)
    port = re.fullmatch(r".+:(\d+)", address)
    if port is None or not 0 < int(port[1]) < 2**16:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}, expected host:port")
    if not (total.isdecimal() and number.isdecimal() and int(number) < int(total)):
        raise ValueError(
            f"JAX_NUM_PROCESSES={total!r} and JAX_PROCESS_ID={number!r}; expected a number of "
            "processes, and for each of them another number from 0 on"
        )
    return Membership(address, int(total), int(number))


def seconds_of(variable: str, default: int) -> int:
    """Return the seconds that a variable of the environment has.

    >>> seconds_of("JAXRL_LLM_START_TIMEOUT_S", 300)
    300
    """
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r}, expected seconds, from 1 on")
    return int(text)


def start_timeout() -> int:
    """Return the seconds that processes wait for each other when they start."""
    return seconds_of(START_TIMEOUT, START_TIMEOUT_S)


def meet(me: Membership, facts: Mapping[str, Any]) -> dict[int, Link]:
    """Wait until all processes have come to the first one's address, which is free again then.

    Args:
        me: Which of them this is.
        facts: What has to be the same in all of them, by name; as JSON has it.

    Returns:
        Connections by the other's number: to all others in the first process, else to the first.

    Raises:
        ValueError: The address is another program's, a number is given twice, or a fact differs.
        TimeoutError: They have not all come in `start_timeout()` seconds.
    """
    hello = {"number": me.number, "facts": {**facts, "JAX_NUM_PROCESSES": me.total}}
    hello |= {"name": f"PID {os.getpid()} on {socket.gethostname()}"}
    if me.number > 0:
        return {0: _knock(me, hello)}
    with _listener(me) as listener:
        links: dict[int, Link] = {}
        host = threading.Thread(
            target=_receive_all, args=(listener, me, hello, links), daemon=True, name="rendezvous"
        )
        host.start()
        _knock(me, hello).connection.close()  # whether the address is this process's
        host.join()
    links.pop(0).connection.close()
    return links


def leave(links: Mapping[int, Link]) -> None:
    """Say to the other sides that this process ends as it should."""
    for link in links.values():
        with contextlib.suppress(OSError):
            link.connection.sendall(b".")


def has_left(link: Link) -> bool:
    """Return whether the other side has said so, rather than that the connection is broken."""
    try:
        return link.connection.recv(1) != b""
    except OSError:
        return False


# ------------------------------------------------------------------------ the first process


def _listener(me: Membership) -> socket.socket:
    bind = os.environ.get(BIND_ADDRESS) or f"[::]:{me.address.rpartition(':')[2]}"
    host, _, port = bind.rpartition(":")
    host, both = host.strip("[]"), socket.has_dualstack_ipv6()
    everywhere = host in ("", "::")
    family = socket.AF_INET6 if (everywhere and both) or ":" in host else socket.AF_INET
    until = time.monotonic() + STRANGER_S
    while True:
        try:
            return socket.create_server(
                ("" if everywhere else host, int(port)),
                family=family,
                backlog=max(128, me.total),
                dualstack_ipv6=everywhere and both,
            )
        except OSError as error:
            if time.monotonic() > until:
                why = os.strerror(error.errno or 0)
                raise ValueError(
                    f"{me}: it can't listen at port {port} ({why}); name a free port of this "
                    "machine in JAX_COORDINATOR_ADDRESS, or end what listens there"
                ) from error
            time.sleep(0.5)


def _receive_all(
    listener: socket.socket, me: Membership, own: Mapping[str, Any], links: dict[int, Link]
) -> None:
    """Let the processes in until all have come, or one is wrong; answer all of them."""
    began, word_at, timeout = time.monotonic(), FIRST_WORD_S, start_timeout()
    listener.settimeout(0.5)
    answer: dict[str, Any] = {}
    while not (answer and 0 in links) and listener.fileno() >= 0:  # this process comes, too
        with contextlib.suppress(OSError):  # nobody comes, or goes again at once
            problem = _let_in(listener.accept()[0], own, links)
            answer = answer or problem
        for number in [n for n, link in links.items() if _is_gone(link.connection)]:
            links.pop(number).connection.close()
        waited, missing = time.monotonic() - began, sorted({*range(me.total)} - {*links})
        if not answer and not missing:
            answer = {"name": own["name"]}
        elif not answer and waited > timeout:
            late = f"{_listed(missing)} did not come in {timeout} s ({START_TIMEOUT})"
            answer = {"late": f"{late}: was it started, and has it ended with an error?"}
        elif not answer and waited > word_at:
            word_at += WORD_S
            _say(f"{me} waits for {_listed(missing)}")
    listener.close()  # before anyone goes on: jax listens there next
    for link in links.values():
        with contextlib.suppress(OSError):
            link.connection.sendall(json.dumps(answer).encode() + b"\n")
        if "name" not in answer:
            link.connection.close()


def _let_in(
    connection: socket.socket, own: Mapping[str, Any], links: dict[int, Link]
) -> dict[str, Any]:
    """Take down who has come; return what is wrong with it, or {}."""
    connection.settimeout(TALK_S)
    connection.sendall(json.dumps(GREETING).encode() + b"\n")
    hello = _read(connection)
    if hello is None or not own.keys() <= hello.keys():  # someone else
        connection.close()
        return {}
    connection.setblocking(False)
    _keep_alive(connection)
    number, name = hello["number"], hello["name"]
    before = links.pop(number, None)
    links[number] = Link(connection, name)
    if before is not None and _is_gone(before.connection):
        before.connection.close()
        before = None
    if before is not None:
        links[-len(links)] = before  # is answered, too
    for fact, theirs in hello["facts"].items():
        if theirs != (ours := own["facts"].get(fact)):
            text = f"process {number} has {fact}={theirs}, process 0 has {ours}"
            return {"wrong": f"{text}; start all of them alike"}
    if before is not None:
        both = f"{before.name} and {name}"
        return {"wrong": f"two have the number {number}, {both}; give each its own JAX_PROCESS_ID"}
    return {}


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"process {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


# ------------------------------------------------------------------------- each process


def _knock(me: Membership, hello: Mapping[str, Any]) -> Link:
    """Come to the first process, and wait until it lets everyone go on."""
    began, word_at, stranger_since = time.monotonic(), FIRST_WORD_S, None
    while True:
        answer, connection, why = _ask(me, hello)
        if answer is not None and connection is not None:
            return _go_on(me, connection, answer)
        now = time.monotonic()
        stranger_since = None if connection is None else stranger_since or now
        if stranger_since is not None and now - stranger_since > STRANGER_S:
            raise ValueError(
                f"{me}: what listens there is no process 0 that waits for others; end it, name "
                "another port in JAX_COORDINATOR_ADDRESS, or start all processes again if the run "
                "has begun without this one"
            )
        if now - began > start_timeout():
            raise TimeoutError(
                f"{me}: nobody has listened there for {start_timeout()} s ({why}); is this process "
                "0's address (JAX_COORDINATOR_ADDRESS), and was process 0 started?"
            )
        if now - began > word_at:
            word_at += WORD_S
            _say(f"{me} waits for process 0 ({why})")
        time.sleep(0.3)


def _ask(
    me: Membership, hello: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, socket.socket | None, str]:
    """Say who this is; return the answer and the connection, or None and why there is none."""
    host, _, port = me.address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), TALK_S)
    except OSError as error:
        return None, None, error.strerror or str(error)
    with contextlib.suppress(OSError):
        if _read(connection) == GREETING:
            connection.sendall(json.dumps(hello).encode() + b"\n")
            connection.settimeout(start_timeout() + 2 * TALK_S)
            if (answer := _read(connection)) is not None:
                return answer, connection, ""
    connection.close()
    return None, connection, "another program listens there"


def _go_on(me: Membership, connection: socket.socket, answer: Mapping[str, Any]) -> Link:
    for kind, error in (("wrong", ValueError), ("late", TimeoutError)):
        if kind in answer:
            connection.close()
            raise error(f"{me}: {answer[kind]}")
    connection.settimeout(None)
    _keep_alive(connection)
    return Link(connection, answer["name"])


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """Read a line of JSON; None if it is none."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(LONGEST_LINE)
        line += part
        if not part or len(line) > LONGEST_LINE:
            return None
    with contextlib.suppress(ValueError):
        read = json.loads(line)
        return read if isinstance(read, dict) else None
    return None


def _keep_alive(connection: socket.socket) -> None:
    """Let a firewall not take a connection for dead on which nothing is said for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def _is_gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
