"""Start or join Ray, put one worker on every device, and end them all, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlayout.errors import PlanError, RlayoutError, WorkerError
from rlayout.rewards.judge import Judge
from rlayout.runtime.host import HOST, Host
from rlayout.runtime.worker import Worker
from rlayout.spec.cluster import Cluster

OBJECT_STORE_BYTES = 512 * 2**20
"""Batches are a few megabytes; weights never travel through the object store."""


@dataclass(frozen=True)
class Limits:
    """How long the controller waits before it names whom it waited for, in seconds."""

    start: float = 180.0
    call: float = 3600.0


@dataclass(frozen=True)
class Node:
    """One machine of the Ray cluster."""

    identity: str
    address: str
    cpus: float
    gpus: float


class Session:
    """Workers of one run. Use it as a context manager: leaving it ends every process it started."""

    def __init__(
        self, cluster: Cluster, *, address: str | None, cache_bytes: int, limits: Limits | None = None
    ) -> None:
        """Nothing starts yet.

        Args:
            cluster: how many nodes and devices the run uses.
            address: of a running Ray cluster to join; None starts one on this machine, on loopback.
            cache_bytes: memory of the generation cache on each device.
            limits: how long to wait.
        """
        self.cluster = cluster
        self.limits = limits or Limits()
        self.workers: list[Any] = []
        self.host: Any = None
        self._address = address
        self._cache_bytes = cache_bytes

    def start(self, judge: Judge | None) -> None:
        """Start or join Ray, then the workers and the host of rewards.

        Raises:
            RlayoutError: something could not start; what had started is ended.
        """
        try:
            self._connect()
            nodes = choose_nodes(self.cluster, visible_nodes())
            self._spawn(nodes)
            self.host = ray.remote(num_cpus=0)(Host).remote(judge)
            self._join(nodes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all actors and, if this session started it, Ray itself."""
        for actor in [*self.workers, *([self.host] if self.host else [])]:
            ray.kill(actor, no_restart=True)
        self.workers, self.host = [], None
        if ray.is_initialized():
            ray.shutdown()

    def on_all(self, method: str, *args: Any, what: str, devices: Sequence[int] | None = None) -> list[Any]:
        """Call a method on all (or some) workers and wait for every answer."""
        chosen = range(len(self.workers)) if devices is None else devices
        references = [getattr(self.workers[d], method).remote(*args) for d in chosen]
        waiting = {ref: worker_name(d) for ref, d in zip(references, chosen, strict=True)}
        return wait_for_all(waiting, limit=self.limits.start, what=what)

    # -- starting -------------------------------------------------------------------------------

    def _connect(self) -> None:
        if ray.is_initialized():
            raise WorkerError("this process is already connected to Ray; one session at a time")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": True, "logging_level": "error"}
        if self._address is None:
            options |= {
                "num_cpus": max(os.cpu_count() or 1, self.cluster.num_devices),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                # By default Ray lets everything else on the machine go before its workers.
                "_system_config": {"worker_niceness": 0},
            }
        try:
            with own_sigterm():
                ray.init(address=self._address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"join the Ray cluster at {self._address}" if self._address else "start Ray on this machine"
            raise WorkerError(f"could not {where}: {error}") from error

    def _spawn(self, nodes: Sequence[Node]) -> None:
        per_node = self.cluster.devices_per_node
        for device in range(self.cluster.num_devices):
            node = nodes[self.cluster.node_of(device)]
            threads = max(1, int(node.cpus) // per_node)
            actor: Any = ray.remote(concurrency_groups={"status": 1})(Worker)  # pyright: ignore[reportCallIssue]
            options = actor.options(
                num_cpus=min(1.0, node.cpus / per_node),
                num_gpus=1 if self.cluster.device_kind == "cuda" else 0,
                max_restarts=0,
                runtime_env={"env_vars": worker_environment(threads, self._address is None)},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.identity, soft=False),
            )
            self.workers.append(options.remote(device, self.cluster.device_kind, threads, self._cache_bytes))

    def _join(self, nodes: Sequence[Node]) -> None:
        self.on_all("describe", what="start")
        host = "127.0.0.1" if self._address is None else nodes[0].address
        (port,) = self.on_all("free_port", what="offer a port", devices=[0])
        self.on_all(
            "join", f"tcp://{host}:{port}", self.cluster.num_devices, self.limits.call, what="meet the others"
        )


def check_reachable(address: str, limit_seconds: float = 5.0) -> None:
    """Refuse the address of a Ray cluster at which nobody listens; Ray itself would try for minutes.

    Raises:
        WorkerError: nobody does. Addresses that are not ``host:port`` (``auto``) are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=limit_seconds).close()
    except OSError as error:
        raise WorkerError(
            f"cluster.address: no Ray cluster answers at {address} ({error}). On its first machine "
            "'ray start --head' prints the address"
        ) from error


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM: Ray puts in one that aborts and leaves workers behind."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def worker_environment(threads: int, local: bool) -> dict[str, str]:
    """Environment of a worker process; one machine talks to itself on loopback only."""
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if local:
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return variables


def visible_nodes() -> list[Node]:
    """The living nodes of the cluster, in the order of their addresses."""
    nodes = [
        Node(
            identity=info["NodeID"],
            address=info["NodeManagerAddress"],
            cpus=info["Resources"].get("CPU", 0.0),
            gpus=info["Resources"].get("GPU", 0.0),
        )
        for info in ray.nodes()
        if info["Alive"]
    ]
    return sorted(nodes, key=lambda node: (socket.inet_aton(node.address), node.identity))


def choose_nodes(cluster: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the run uses: the first that have enough devices.

    Raises:
        PlanError: too few nodes have enough; the message holds the arithmetic.
    """
    kind = "GPU" if cluster.device_kind == "cuda" else "CPU"
    fitting = [n for n in nodes if (n.gpus if kind == "GPU" else n.cpus) >= cluster.devices_per_node]
    if len(fitting) < cluster.num_nodes:
        seen = "; ".join(f"{n.address}: {n.cpus:g} CPU, {n.gpus:g} GPU" for n in nodes) or "none"
        raise PlanError(
            f"the plan needs {cluster.num_nodes} nodes with {cluster.devices_per_node} {kind} each = "
            f"{cluster.num_devices} {kind}, but Ray sees {len(fitting)} such nodes of {len(nodes)} ({seen})"
        )
    return fitting[: cluster.num_nodes]


def worker_name(device: int) -> str:
    return "the host of rewards" if device == HOST else f"worker {device}"


# -- waiting ------------------------------------------------------------------------------------


def wait_for_all(waiting: dict[Any, str], *, limit: float, what: str) -> list[Any]:
    """Wait for all references, in their order.

    Raises:
        WorkerError: one failed, or the limit passed; the message names it.
    """
    left = list(waiting)
    deadline = time.monotonic() + limit
    while left:
        ready, left = ray.wait(left, num_returns=len(left), timeout=min(1.0, limit))
        raise_failures({ref: waiting[ref] for ref in ready}, left, waiting, what)
        if left and time.monotonic() > deadline:
            names = ", ".join(waiting[ref] for ref in left)
            raise WorkerError(f"{names} did not {what} within {limit:g} seconds")
    return ray.get(list(waiting))


def raise_failures(ready: dict[Any, str], left: Sequence[Any], names: dict[Any, str], what: str) -> None:
    """Raise the one error that explains the failures among ``ready``, if there are any.

    When a process dies its peers fail too, a moment earlier or later, with a broken connection. So
    a failure waits shortly for others and the most telling is raised: an error of rlayout's own,
    else a death, else the first exception.
    """
    failures = _failures(ready)
    if not failures:
        return
    if left:
        late, _ = ray.wait(list(left), num_returns=len(left), timeout=3.0)
        failures |= _failures({ref: names[ref] for ref in late})
    own = [e for e in failures.values() if isinstance(e, RayTaskError) and isinstance(e.cause, RlayoutError)]
    if own:
        # Such an error explains itself; the worker's traceback is the cause that it is raised from.
        raise type(own[0].cause)(str(own[0].cause)) from own[0]
    dead = [name for name, e in failures.items() if isinstance(e, RayActorError)]
    if dead:
        reason = str(failures[dead[0]]).strip().splitlines()[0]
        raise WorkerError(f"{', '.join(dead)} died in {what}: {reason}") from failures[dead[0]]
    name, error = next(iter(failures.items()))
    raise WorkerError(f"{name} failed in {what}; the traceback there:\n{error}") from error


def _failures(references: dict[Any, str]) -> dict[str, Exception]:
    failures: dict[str, Exception] = {}
    for reference, name in references.items():
        try:
            ray.get(reference, timeout=0)
        except (RayTaskError, RayActorError) as error:
            failures[name] = error
        except GetTimeoutError:
            continue
    return failures
