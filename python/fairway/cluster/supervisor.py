"""A run: the controller in this process, its hosts as child processes."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from fairway import _native
from fairway.cluster.admin import remote_socket_path, socket_path
from fairway.cluster.agents import SERVICE
from fairway.cluster.answering import AdminService
from fairway.cluster.gateways import ControllerGateway, state_directory
from fairway.cluster.launchers.choosing import open_launcher
from fairway.cluster.launchers.joined import JoinedHosts, Joining
from fairway.cluster.launchers.local import LocalHosts
from fairway.cluster.launchers.network import NoNamespaceError
from fairway.cluster.listener import AdminSocket
from fairway.cluster.logs import Logs
from fairway.cluster.modules import ModuleArchive
from fairway.cluster.registry import new_directory
from fairway.cluster.reports import Refusals, Reports
from fairway.cluster.serving import ServerSettings
from fairway.errors import ConfigError, IslandError, StartError
from fairway.host.__main__ import HostSettings, tcp_address
from fairway.report.timeline import Samples, Timeline
from fairway.settings import IslandSettings, Settings

__all__ = ["Run", "client_environment"]

REPLACE_S = 600.0
"""Time for which a launcher is asked to bring a lost island back."""
REPLACE_EVERY_S = 1.0
REACHED_S = 15.0
"""Time within which hosts that are up have tried to reach each other."""
PAIRS_SHOWN = 4
RECORDED_S = 5.0
"""Time that hosts have to write their last records, and machines to send them."""
LOOK_S = 0.01
"""Time between two looks at hosts that start."""
LOOKING_MAX = 0.05
"""Most of its time that the controller spends on these looks: each is in O(hosts)."""


def client_environment(target: str) -> dict[str, str]:
    """Returns the environment variables that a client of ``target`` needs."""
    return {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": target}


def _team_channels(islands: Sequence[IslandSettings]) -> tuple[tuple[int, float | None], ...]:
    """Returns the channels of all islands with the lowest rate of each; ``(0, None)`` if none."""
    rates = [[channel.rate_bps for channel in island.channels] for island in islands]
    if min(map(len, rates)) == 0:
        return ((0, None),)
    return tuple((number, min(of)) for number, of in enumerate(zip(*rates, strict=False), 1))


class Run:
    """Islands that are up as long as the context lasts.

    Args:
        settings: the islands to bring up.
        cluster: name by which other processes find the run; None keeps it private.
        on_progress: called with the hosts that are up, all hosts, and the numbers of those without
            an agent, whenever that changes.
        check: called repeatedly until all hosts are up; an exception that it raises aborts the
            start, and everything started so far is taken down.

    Raises:
        StartError: a host does not start.
        OSError: the address for clients is taken.
        ValueError: the address for clients is malformed or not of this machine alone.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: str | None = None,
        on_progress: Callable[[int, int, list[int]], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self.cluster = cluster
        self._on_progress = on_progress or (lambda up, total, missing: None)
        self._check = check or (lambda: None)
        self._services: list[Any] = []
        self._admins: list[AdminSocket] = []
        self._closing = threading.Event()
        self._started = False
        self._samples: Samples | None = None
        self.timeline: Timeline | None = None
        """Computations and transfers; available once the run is closed, if the settings ask for a
        timeline or a capture."""
        self.directory = new_directory()
        self._hosts: LocalHosts | JoinedHosts
        self._replacing: set[int] = set()
        """Islands that are being brought back."""
        self._were_up: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}
        """Island of each host, and its rank there."""
        self._shapes: dict[int, IslandSettings] = {}
        """Settings of each island."""
        self._first_devices: dict[int, int] = {}
        self._next_device = 0
        self._starts = 0
        """Processes started so far; numbers the sockets of each."""
        self._changing = threading.Lock()
        self._token = secrets.token_hex(32)
        try:
            self._logs = Logs(settings.log_folder)
            self._reports = Reports(self._logs)
            self._server = _native.Server(ServerSettings.of(settings, self.directory, self._token))
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        try:
            self._gateway = self._open_gateway()
            self._hosts = LocalHosts(self._logs) if settings.is_local else self._accept_agents()
        except BaseException:
            self._server.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        try:
            host = 0
            for number, island in enumerate(settings.islands):
                self._check()
                self._start_island(number, island, list(range(host, host + island.hosts)))
                host += island.hosts
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """The value of ``JAX_BACKEND_TARGET`` for clients of this run."""
        return f"grpc://{self._server.address}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a client of this run needs."""
        return client_environment(self.target)

    def _open_gateway(self) -> ControllerGateway | None:
        """Listens for other machines if the settings say so.

        Raises:
            OSError: the address cannot be listened at.
        """
        if not self.settings.gateway:
            return None
        settings = self.settings
        state = state_directory(self.cluster) if self.cluster is not None else None
        return ControllerGateway(
            settings.gateway, self.directory, state, self._reports, settings.certificate_files
        )

    def _accept_agents(self) -> JoinedHosts:
        """Lets agents of other machines join; launches some where the settings say so.

        Raises:
            StartError: the engine that launches them is not there.
        """
        assert self._gateway is not None
        launcher = open_launcher(self.settings, self._logs, self._reports.add)
        token = self._gateway.create_token("host", None)
        self._gateway.write_host_token(token)
        addresses, lease_s = self._gateway.addresses, self.settings.timeout_s
        joining = Joining(
            addresses,
            token,
            lease_s,
            launcher,
            self._pack_modules(),
            needs_gpus=self.settings.platform == "cuda",
            channels=self.settings.channels,
            hosts=sum(island.hosts for island in self.settings.islands),
        )
        hosts = JoinedHosts(self.directory, joining, self._reports.add, self._logs)
        self._gateway.offer("control", "host", f"unix:{self.directory}/control.sock")
        self._gateway.offer(SERVICE, "host", f"unix:{hosts.path}")
        return hosts

    @property
    def logs(self) -> Logs:
        """What controller and hosts have printed."""
        return self._logs

    def _pack_modules(self) -> tuple[ModuleArchive, ...]:
        """Packs the modules of input functions, for machines without the folders of this one."""
        packed = []
        for folder in self.settings.input_path:
            try:
                packed.append(ModuleArchive.of(folder, self.settings.input_modules))
            except OSError as error:
                self._reports.add(f"modules in {folder} are not sent: {error.strerror}")
            except ConfigError as error:
                self._reports.add(str(error))
        return tuple(packed)

    @property
    def gateway(self) -> ControllerGateway | None:
        """The listener for other machines; None if there is none."""
        return self._gateway

    def start(self) -> None:
        """Waits until all hosts are up; entering the context calls it."""
        if self._started:
            return
        try:
            self._wait_for(list(self._places), self._check)
            self._were_up = set(self._shapes)
            self._open_admin()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._stop_lost_hosts, daemon=True).start()
        if self.settings.timeline:
            self._samples = Samples(self._server.overview)
        self._started = True

    def _open_admin(self) -> None:
        """Answers requests of the owner, and through the gateway of other machines."""
        service = AdminService(
            self.overview,
            self._server,
            self._logs,
            self._gateway,
            self.add_island,
            lambda number, force: self.remove_island(number, force=force),
        )
        if self._gateway is not None:
            remote = remote_socket_path(self.directory)
            refusals = Refusals(self._reports)
            self._admins.append(AdminSocket(remote, service.answer, refusals, is_announced=True))
            self._gateway.offer("admin", "client", f"announced:{remote}")
            self._gateway.offer_clients(self._server)
        # Its path shows that the run is up, so it comes last.
        self._admins.append(
            AdminSocket(socket_path(self.directory), service.answer, Refusals(self._reports))
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends hosts and controller and removes their sockets."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._samples is not None:
            self._samples.close()
        for admin in self._admins:
            admin.close()
        recorded = self._started and self._records
        try:
            self._server.close()
            # Hosts end when they lose their controller, and write their last records first.
            self._hosts.close(grace_s=RECORDED_S if recorded else 0.0)
            if self._gateway is not None:
                self._gateway.close()
            if recorded:
                self._read_records()
            self._reports.close()
            self._logs.close()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _records(self) -> bool:
        """Do hosts record computations and transfers?"""
        return bool(self.settings.timeline) or self.settings.capture

    def _read_records(self) -> None:
        records = {
            host: (island, rank, self._trace(host)) for host, (island, rank) in self._places.items()
        }
        self.timeline = Timeline(records, self._samples.found if self._samples else ())
        if self.settings.timeline:
            self.timeline.write(self.settings.timeline)

    @property
    def devices(self) -> dict[int, range]:
        """The devices of each host, by number over all islands."""
        first, devices = 0, {}
        for host, (island, _) in sorted(self._places.items()):
            count = self._shapes[island].devices
            devices[host] = range(first, first + count)
            first += count
        return devices

    def captured(self) -> list[tuple[int, str | None, str | None]]:
        """Returns each disconnected client's last step, as text or as the error in its place."""
        return self._server.captured()

    def overview(self) -> dict[str, Any]:
        """Returns the state that ``fairway status`` shows."""
        return {
            "cluster": self.cluster,
            "target": self.target,
            "process": os.getpid(),
            "directory": str(self.directory),
            **self._server.overview(),
        }

    def add_island(self, island: IslandSettings) -> int:
        """Brings another island up while clients run.

        A lost or removed island of this shape comes back under its old number.

        Returns:
            The number of the island.

        Raises:
            StartError: a host does not start.
        """
        try:
            with self._changing:
                number, hosts = self._server.add_island(island.hosts, island.devices)
                self._start_island(number, island, hosts)
            # Without the lock: an island that waits for machines holds up no other.
            self._wait_for(hosts, self._check_open)
        except StartError as error:
            self._server.fail_island(number, str(error))
            raise
        self._were_up.add(number)
        return number

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StartError("the islands are being taken down")

    def remove_island(self, number: int, *, force: bool = False) -> None:
        """Takes an island down while clients run; slices on it migrate to other islands.

        Args:
            number: the island.
            force: remove it at once even if clients use it; they see it as lost.

        Raises:
            IslandError: there is no such island, it is the only one, or slices on it cannot be
                migrated.
        """
        with self._changing:
            try:
                self._server.remove_island(number, force)
                while not self._server.is_removed(number):
                    if self._closing.wait(0.005):
                        return
            except _native.StatusError as error:
                raise IslandError(error.args[1]) from None

    def _start_island(self, number: int, island: IslandSettings, hosts: list[int]) -> None:
        """Starts the hosts of an island, without waiting until they are up."""
        settings = self.settings
        self._shapes[number] = island
        flags = (
            f"--xla_cpu_collective_timeout_seconds={max(1, round(settings.timeout_s * 4))} "
            f"--xla_cpu_collective_call_terminate_timeout_seconds=600 {settings.xla_flags}"
        ).strip()
        coordinator = self._coordinate(island.hosts) if island.hosts > 1 else None
        namespaces = self._separate(number, island)
        for rank, host in enumerate(hosts):
            self._places[host] = (number, rank)
            near = f"unix:{self.directory}/data-{self._starts}.sock"
            far = tcp_address(island.address_of(rank))
            data = {"unix": near, "tcp": far, "both": f"{near},{far}"}[settings.data_plane]
            self._hosts.start(
                HostSettings(
                    host=host,
                    rank=rank,
                    hosts=island.hosts,
                    devices=island.devices,
                    first_device=self._first_device(host, island),
                    platform=settings.platform,
                    coordinator=coordinator,
                    address=island.address_of(rank),
                    control=str(self.directory / "control.sock"),
                    data=data,
                    channels=island.channels_of(rank),
                    team_channels=_team_channels(settings.islands),
                    is_near=settings.data_plane == "unix",
                    encrypt=settings.encrypts,
                    token=self._token,
                    timeout_s=settings.timeout_s,
                    xla_flags=flags,
                    device_memory=settings.bytes_of("device_memory"),
                    compile_cache=settings.bytes_of("compile_cache") or 0,
                    trace=str(self._trace(host)) if self._records else None,
                    input_modules=settings.input_modules,
                    input_path=tuple(str(path.resolve()) for path in settings.input_path),
                    custom_calls=settings.custom_calls,
                    namespaces=namespaces,
                    island=number,
                ),
                island.prefix_of(rank),
            )
            self._starts += 1
        self._hosts.fill(number)

    def _separate(self, number: int, island: IslandSettings) -> tuple[str, ...]:
        """Gives an island whose hosts need no other network a namespace of its own."""
        settings = self.settings
        alone = island.hosts == 1 or settings.platform != "cpu"
        placed = island.prefix or island.channels or island.address != IslandSettings.address
        reached = settings.data_plane != "unix" or placed
        if alone or reached or not settings.private_network:
            return ()
        try:
            return self._hosts.separate(number)
        except NoNamespaceError as error:
            self._reports.add(
                f"other users of this machine can reach collectives of island {number}: "
                f"its hosts get no network of their own ({error}); allow unprivileged user "
                "namespaces, give the island one host, or set private_network = false to say that "
                "this is known"
            )
            return ()

    def _first_device(self, host: int, island: IslandSettings) -> int:
        """Returns a host's first GPU: after those of earlier hosts; 0 if a prefix selects GPUs."""
        if island.prefix:
            return 0
        if host not in self._first_devices:
            self._first_devices[host] = self._next_device
            self._next_device += island.devices
        return self._first_devices[host]

    def _trace(self, host: int) -> Path:
        return self.directory / f"trace-{host}.jsonl"

    def _coordinate(self, hosts: int) -> str:
        """Starts an island's coordination service in this process; returns its address.

        The address is a Unix socket, which can be reached from any network namespace.
        """
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read when jaxlib is first imported
        from fairway.host.backend import coordination_service

        address = f"unix:{self.directory}/island-{self._starts}.sock"
        self._services.append(coordination_service(address, hosts))
        if self._gateway is not None and not self.settings.is_local:
            self._gateway.offer(f"island-{self._starts}", "host", address)
        return address

    def _wait_for(self, wanted: list[int], check: Callable[[], None]) -> None:
        """Waits until hosts are up.

        Raises:
            StartError: a host is lost, its process has ended, or time is up; the text says why.
        """
        timeout_s = self._hosts.start_timeout_s
        deadline = time.monotonic() + timeout_s
        shown: tuple[int, list[int]] = (-1, [])
        islands = {self._places[host][0] for host in wanted}
        while True:
            began_s = time.monotonic()
            overview = self._server.overview()
            found = [island for island in overview["islands"] if island["id"] in islands]
            hosts = [host for island in found for host in island["hosts"]]
            up = sum(host["process"] is not None and not host["lost"] for host in hosts)
            if (now := (up, self._hosts.missing())) != shown:
                self._on_progress(up, len(wanted), now[1])
                shown = now
            if all(island["state"] == "up" for island in found):
                self._check_reachability(wanted, check)
                return
            if any(island["state"] == "lost" for island in found):
                raise StartError(next(host["lost"] for host in hosts if host["lost"]))
            self._hosts.check(wanted)
            check()
            if time.monotonic() > deadline:
                absent = ", ".join(map(str, self._hosts.missing()))
                why = f"; no agent has joined for hosts {absent}" if absent else ""
                raise StartError(f"{up} of {len(wanted)} hosts are up after {timeout_s:.0f} s{why}")
            time.sleep(max(LOOK_S, (time.monotonic() - began_s) / LOOKING_MAX))

    def _check_reachability(self, hosts: list[int], check: Callable[[], None]) -> None:
        """Waits until hosts that are up have tried to reach each other, and the controller them.

        Raises:
            StartError: some do not; the text names the pairs.
        """
        deadline = time.monotonic() + REACHED_S
        while (pairs := self._server.unreachable(hosts)) is None:
            check()
            if time.monotonic() > deadline:
                return  # a host is slow; what it does not reach it says when it uses it
            time.sleep(0.01)
        if pairs:
            sentences = [
                f"{'the controller' if host == peer else f'host {host}'} cannot reach host {peer}: "
                f"{error}"
                for host, peer, error in pairs[:PAIRS_SHOWN]
            ]
            more = len(pairs) - PAIRS_SHOWN
            rest = f"; and {more} more pairs" if more > 0 else ""
            raise StartError(
                f"{'; '.join(sentences)}{rest}; expected a network without firewalls between all "
                "hosts, and addresses of it (`fairway host --address`)"
            )

    def _stop_lost_hosts(self) -> None:
        while not self._closing.is_set():
            stop = self._server.next_stop(0.2)
            if stop is None:
                continue
            number, process, restarts = stop
            if restarts:
                arguments = (self._shapes[number],)
                threading.Thread(target=self._restart, args=arguments, daemon=True).start()
                continue
            if process is not None and (ending := self._hosts.ending(number, process)):
                self._reports.add(f"host {number} has ended {ending}")
            self._hosts.stop(number, process)
            if self._hosts.replaces:
                self._replace(self._places[number][0])

    def _restart(self, island: IslandSettings) -> None:
        """Brings an island back that was removed because its client was lost."""
        try:
            self.add_island(island)
        except StartError as error:
            if not self._closing.is_set():
                self._reports.add(f"an island does not come back: {error}")

    def _replace(self, number: int) -> None:
        """Brings a lost island back on what its launcher finds, unless that is being done."""
        states = {island["id"]: island["state"] for island in self._server.overview()["islands"]}
        is_lost = states.get(number) == "lost" and number in self._were_up
        if is_lost and number not in self._replacing:
            self._replacing.add(number)
            threading.Thread(target=self._bring_back, args=(number,), daemon=True).start()

    def _bring_back(self, number: int) -> None:
        deadline, said = time.monotonic() + REPLACE_S, ""
        self._reports.add(f"island {number} is lost; its hosts are started anew")
        try:
            while not self._closing.wait(REPLACE_EVERY_S):
                try:
                    back = self.add_island(self._shapes[number])
                except StartError as error:
                    if self._closing.is_set():
                        return
                    if time.monotonic() > deadline:
                        self._reports.add(f"island {number} stays lost: {error}")
                        return
                    if str(error) != said:
                        said = str(error)
                        self._reports.add(f"island {number} does not come back yet: {said}")
                else:
                    self._reports.add(f"island {back} is up again")
                    return
        finally:
            self._replacing.discard(number)
