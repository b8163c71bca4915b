"""Settings of a run: options of `fairway up` and `fairway run`."""

from __future__ import annotations

import dataclasses
import ipaddress
import pwd
import re
import reprlib
import stat
import tomllib
from pathlib import Path
from typing import Any, Self

from fairway.errors import ConfigError
from fairway.quantities import parse_networks, parse_rate, parse_size

__all__ = ["ChannelSettings", "IslandSettings", "Settings"]

DEFAULT_ISLANDS = "2x1x4"
RANK = "{rank}"
"""Placeholder for a host's rank in its island."""
ENGINES = ("local", "agents", "ssh", "slurm", "ray", "k8s", "pods")
WITH_OPTIONS = ("ssh:", "slurm:", "ray:", "k8s:")
ENGINES_FORM = "'local', 'agents', 'ssh:FILE', 'slurm', 'ray' or 'k8s:IMAGE'"
BEHIND_COLON = {
    "ssh": "machines behind a colon, such as 'ssh:hosts.txt' or 'ssh:m1,m2'",
    "k8s": "an image or a file behind a colon, such as 'k8s:registry/image' or 'k8s:cluster.yaml'",
}
GATEWAY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):\d{1,5}")
ANY_ADDRESS = "0.0.0.0:0"
Rule = tuple[bool, str, str]
"""Whether a setting is valid, its name, and what is expected."""
COUNT_MAX = 1024
"""Most islands, hosts of an island, and devices of a host."""
HOSTS_MAX = 1024
DEVICES_MAX = 1 << 16
"""Most hosts and devices of all islands. The controller keeps a queue for each device, and a
connection to each host."""


@dataclasses.dataclass(frozen=True)
class ChannelSettings:
    """A channel: a network path of each host of an island, with capacity of its own.

    Attributes:
        address: numeric, where the host is reached over it; ``{rank}`` in it stands for the host's
            rank in its island.
        rate: bandwidth per direction, such as ``"10Gbit/s"``.
    """

    address: str
    rate: str

    @property
    def rate_bps(self) -> float:
        """``rate`` in bits per second.

        Raises:
            ConfigError: it is malformed.
        """
        return parse_rate("the rate of a channel", self.rate)


@dataclasses.dataclass(frozen=True)
class IslandSettings:
    """One island: its host processes and the devices of each.

    Attributes:
        hosts: number of hosts.
        devices: number of devices per host.
        prefix: command prefix of each host, which must exec the host in its own process, as with
            ``ip netns exec NAME``, ``taskset`` and ``numactl``; ``{rank}`` in it stands for the
            host's rank in its island.
        address: numeric, where its hosts listen for other hosts by TCP, if the ``data_plane`` is
            ``tcp`` or ``both``; ``{rank}`` as above.
        channels: paths to hosts of other islands that have channels too; the first channels of all
            islands connect to each other, the second ones, and so on. Large transfers are striped
            over them, and over those of neighbouring hosts. Empty: only ``address`` is used.
    """

    hosts: int
    devices: int
    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    channels: tuple[ChannelSettings, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an island written as ``HOSTSxDEVICES``.

        >>> IslandSettings.parse("1x4")
        IslandSettings(hosts=1, devices=4, prefix=(), address='127.0.0.1', channels=())

        Raises:
            ConfigError: the text is malformed.
        """
        hosts, devices = _parse_counts(text, "HOSTSxDEVICES", "1x4")
        return cls(hosts, devices)

    def prefix_of(self, rank: int) -> tuple[str, ...]:
        """Returns the command prefix of a host."""
        return tuple(_of_rank(word, rank) for word in self.prefix)

    def address_of(self, rank: int) -> str:
        """Returns the address where a host listens for others."""
        return _of_rank(self.address, rank)

    def channels_of(self, rank: int) -> tuple[tuple[str, float], ...]:
        """Returns address and rate (bits per second) of each of a host's channels."""
        return tuple((_of_rank(one.address, rank), one.rate_bps) for one in self.channels)


def _parse_counts(text: str, form: str, example: str) -> tuple[int, ...]:
    """Reads the numbers of ``text``, as many as ``form`` has.

    Raises:
        ConfigError: it is not of that form, or a number is 0 or too large.
    """
    parts = text.split("x")
    digits = all(part.isascii() and part.isdigit() for part in parts)
    counts = [int(part) for part in parts] if digits else []
    right = len(counts) == len(form.split("x"))
    if not right or not all(1 <= count <= COUNT_MAX for count in counts):
        raise ConfigError(
            f"cannot read islands from {text!r}; expected {form} with whole numbers of 1 to "
            f"{COUNT_MAX}; try {example}"
        )
    return tuple(counts)


def _of_rank(text: str, rank: int) -> str:
    return text.replace(RANK, str(rank))


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run.

    Attributes:
        islands: the islands.
        listen: where clients connect: ``127.0.0.1:PORT``.
        on: what runs the hosts. ``local``: processes of this machine. ``agents``: agents that
            people start with ``fairway host``. ``ssh:FILE`` or ``ssh:NAME,NAME``: agents on
            machines that ssh reaches; a line of the file is a machine, as ``[USER@]NAME [slots=N]
            [python=PATH]``. ``slurm``, with options for ``srun`` behind a colon: agents on nodes of
            Slurm. ``ray`` or ``ray:ADDRESS``: agents on a Ray cluster. ``k8s:IMAGE`` or
            ``k8s:FILE`` with manifests: controller and agents in Kubernetes; there the controller
            itself has ``pods``.
        nodes: nodes of Slurm to ask for, outside of an allocation; 0 for one for each host.
        gateway: ``ADDRESS:PORT`` where other machines connect, by TLS and with a token; needed for
            all but ``local`` hosts, for which any free port of all addresses is the default. Empty:
            no other machine can.
        certificate: file with a certificate for the gateway, and last that of the authority that
            signed it (PEM); None uses an authority of the controller's own. Tokens are valid as
            long as that authority and the certificate's first DNS name, which may be any.
        certificate_key: file with its private key (PEM).
        platform: ``cpu`` or ``cuda``. Hosts of one machine get its GPUs in order; hosts of an
            island with a prefix use the first GPUs that it exposes (``CUDA_VISIBLE_DEVICES``).
        timeout_s: watchdog deadline: a host without a heartbeat for this long is lost; other
            timeouts derive from it.
        data_plane: ``unix`` (shared memory, one machine), ``tcp`` (streams), or ``both``: shared
            memory between hosts of one machine and network namespace, streams between others.
        encryption: whether streams between hosts are encrypted (TLS 1.3). ``auto``: where hosts are
            on other machines; ``on``: those of this machine's addresses, too; ``off``: never. They
            are authenticated in any case.
        channels: network paths between hosts on other machines, over which large transfers are
            striped. ``auto``: one for each network on which all machines have an address of their
            own, with the rate of its interfaces; or networks, such as
            ``10.1.0.0/16=100Gbit/s,10.2.0.0/16``. Empty: each host uses one address. (Hosts of this
            machine have the channels of their islands.)
        slice_index: give devices their island's number as ``slice_index``.
        private_network: give CPU islands of several hosts a network namespace of their own, where
            nothing else needs the machine's network: XLA's collectives accept any connection.
        launch_window: most launches in flight to one host (flow control).
        dispatch: ``parallel``, or ``sequential``: a client's next launch waits until the previous
            one was enqueued on its devices; a baseline for measurements.
        plan: ``auto`` schedules the cross-island collectives of a program jointly (order and
            algorithms), from measured runs; ``off`` runs them one after another.
        capture: record what clients do, so that their last step can be exported as a program.
        device_memory: limit of each device's memory, such as ``"512MiB"``; empty uses the
            platform's limit, and no accounting where the platform reports none, as on CPUs. Where
            it is set, GPUs allocate memory on demand, so that hosts can share one.
        compile_cache: bytes that each host machine keeps of compiled programs on disk, in
            ``~/.cache/fairway/programs`` (or in ``$XDG_CACHE_HOME``), such as ``"4GiB"``; ``off``
            keeps none.
        xla_flags: more flags for XLA on the hosts.
        timeline: file for a timeline of the run; None writes none.
        log_folder: folder for what hosts and controller print, as rotated files of JSON; None
            keeps the last lines in memory only.
        input_modules: prefixes of the modules from which hosts may import input functions; None
            allows those whose files lie under ``input_path``.
        input_path: folders in which hosts search modules, before others; ``fairway run`` adds that
            of its script.
        custom_calls: targets of custom calls that programs may make besides JAX's own, such as
            ``"my_kernel"``, which a module for input functions registers when hosts import it.
            Hosts cannot check what clients pass to them.
        allow_users: users of this machine besides the owner, by name or number, that may connect as
            clients. They can use all that clients can, including input functions.
        client_code: let all clients run Python functions of their own (``colocated_python``) as the
            hosts' user. Otherwise only that user's own clients can, and those with an
            administrator's token; users in ``allow_users`` can as themselves, where hosts are
            root's.
    """

    islands: tuple[IslandSettings, ...]
    listen: str = "127.0.0.1:0"
    on: str = "local"
    nodes: int = 0
    gateway: str = ""
    certificate: Path | None = None
    certificate_key: Path | None = None
    platform: str = "cpu"
    timeout_s: float = 10.0
    data_plane: str = "unix"
    encryption: str = "auto"
    channels: str = ""
    slice_index: bool = True
    private_network: bool = True
    launch_window: int = 256
    dispatch: str = "parallel"
    plan: str = "off"
    capture: bool = False
    device_memory: str = ""
    compile_cache: str = "4GiB"
    xla_flags: str = ""
    timeline: Path | None = None
    log_folder: Path | None = None
    input_modules: tuple[str, ...] | None = None
    input_path: tuple[Path, ...] = ()
    custom_calls: tuple[str, ...] = ()
    allow_users: tuple[str, ...] = ()
    client_code: bool = False

    def __post_init__(self) -> None:
        """Validates the settings.

        Raises:
            ConfigError: names the setting, its value and what was expected.
        """
        for number, island in enumerate(self.islands):
            _check_island(number, island)
        if not self.is_local and not self.gateway:
            object.__setattr__(self, "gateway", ANY_ADDRESS)
        _check_counts(
            sum(island.hosts for island in self.islands),
            sum(island.hosts * island.devices for island in self.islands),
        )
        for holds, name, expected in (*self._rules(), *self._rules_of_other_machines()):
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")
        _ = self.bytes_of("device_memory"), self.bytes_of("compile_cache"), self.user_numbers
        parse_networks(self.channels)

    def _rules(self) -> list[Rule]:
        return [
            (bool(self.islands), "islands", "at least one island"),
            (0.1 <= self.timeout_s <= 3600, "timeout_s", "0.1 to 3600 seconds"),
            (1 <= self.launch_window <= 1 << 20, "launch_window", f"1 to {1 << 20}"),
            (self.data_plane in ("unix", "tcp", "both"), "data_plane", "'unix', 'tcp' or 'both'"),
            (
                self._use_addresses(),
                "data_plane",
                "'tcp' or 'both' for islands with addresses, by which nothing would go otherwise",
            ),
            (self.encryption in ("auto", "on", "off"), "encryption", "'auto', 'on' or 'off'"),
            (
                self.encryption != "on"
                or self.data_plane != "unix"
                or any(island.channels for island in self.islands),
                "encryption",
                "'auto' or 'off' where hosts communicate by shared memory alone",
            ),
            (self.dispatch in ("parallel", "sequential"), "dispatch", "'parallel' or 'sequential'"),
            (self.plan in ("off", "auto"), "plan", "'off' or 'auto'"),
            (self.platform in ("cpu", "cuda"), "platform", "'cpu' or 'cuda'"),
            (self._names_modules(), "input_modules", "names such as 'corpus' or 'package.data'"),
            (all(self.custom_calls), "custom_calls", "names such as 'my_kernel'"),
        ]

    def _rules_of_other_machines(self) -> list[Rule]:
        return [
            (self.on in ENGINES or self.on.startswith(WITH_OPTIONS), "on", ENGINES_FORM),
            (not (missing := BEHIND_COLON.get(self.on.rstrip(":"), "")), "on", missing),
            (0 <= self.nodes <= HOSTS_MAX, "nodes", f"0 to {HOSTS_MAX}"),
            (not self.nodes or self.on.startswith("slurm"), "nodes", "0 for all but 'slurm'"),
            (
                not self.gateway or GATEWAY.fullmatch(self.gateway) is not None,
                "gateway",
                "ADDRESS:PORT of this machine, such as '10.0.0.1:7000' or '0.0.0.0:7000'",
            ),
            (
                (self.certificate is None) == (self.certificate_key is None),
                "certificate_key",
                "a file where a certificate is given, and none elsewhere",
            ),
            (
                self.certificate is None or bool(self.gateway and not self.is_in_kubernetes),
                "certificate",
                "none without a gateway, and for 'k8s', whose controller has no such file",
            ),
            (
                self.is_local or self.data_plane == "tcp",
                "data_plane",
                "'tcp' where hosts are on other machines",
            ),
            (
                not (self.is_local and self.channels),
                "channels",
                "'' for hosts of this machine, whose islands have channels of their own",
            ),
            (
                self.is_local or not any(one.prefix or one.channels for one in self.islands),
                "on",
                "'local' for islands with a prefix or channels, which are of this machine",
            ),
            (
                not ((self.timeline or self.capture) and self.on.startswith(("k8s", "pods"))),
                "on",
                "not 'k8s' for a timeline or a capture, which would stay in the controller's pod",
            ),
        ]

    @property
    def is_local(self) -> bool:
        """Whether hosts are processes of this machine."""
        return self.on == "local"

    @property
    def is_in_kubernetes(self) -> bool:
        """Whether the controller is in Kubernetes, too."""
        return self.on.partition(":")[0] == "k8s"

    @property
    def certificate_files(self) -> tuple[Path, Path] | None:
        """The files of a certificate that is given and of its private key."""
        if self.certificate is None or self.certificate_key is None:
            return None
        return self.certificate, self.certificate_key

    @property
    def encrypts(self) -> bool:
        """Whether streams between hosts are encrypted."""
        return self.encryption == "on" or (self.encryption == "auto" and not self.is_local)

    def bytes_of(self, name: str) -> int | None:
        """Returns the bytes of the size that a setting is; None if it is empty or ``off``.

        Raises:
            ConfigError: it is malformed.
        """
        given = getattr(self, name)
        return None if given in ("", "off") else parse_size(name, given)

    @property
    def user_numbers(self) -> list[int]:
        """``allow_users`` as numeric user IDs.

        Raises:
            ConfigError: this machine has no such user.
        """
        return [_number_of(user) for user in self.allow_users]

    def _names_modules(self) -> bool:
        return all(
            part.isidentifier() for name in self.input_modules or () for part in name.split(".")
        )

    def _use_addresses(self) -> bool:
        return self.data_plane != "unix" or all(
            island.address == IslandSettings.address or island.channels for island in self.islands
        )

    @classmethod
    def parse(cls, islands: str = DEFAULT_ISLANDS, **others: Any) -> Self:
        """Reads settings with islands written as ``ISLANDSxHOSTSxDEVICES``.

        >>> len(Settings.parse("2x1x4").islands), Settings.parse("2x1x4").islands[0].devices
        (2, 4)

        Raises:
            ConfigError: the text is malformed.
        """
        count, hosts, devices = _parse_counts(islands, "ISLANDSxHOSTSxDEVICES", "2x1x4")
        _check_counts(count * hosts, count * hosts * devices)
        return cls(islands=(IslandSettings(hosts, devices),) * count, **others)

    def replace(self, **changes: Any) -> Self:
        """Returns the same settings with some changed."""
        return dataclasses.replace(self, **changes)

    def serving(self, script: Path) -> Self:
        """Returns the same settings for one script; hosts find input functions in its folder."""
        own = script.resolve().parent
        # In a world-writable folder such as /tmp any user could put a module beside the script.
        folders = () if own.stat().st_mode & stat.S_IWOTH else (own,)
        return self.replace(input_path=(*folders, *self.input_path))

    @classmethod
    def read(cls, path: Path, **changes: Any) -> Self:
        """Reads settings from a TOML file.

        The file holds the attributes of this class by name, and either ``islands = "2x1x4"`` or
        one ``[[islands]]`` table with the attributes of :class:`IslandSettings` for each island.

        Args:
            path: the file.
            changes: settings in place of those of the file; the islands as for :meth:`parse`.

        Raises:
            ConfigError: the file cannot be read, is not TOML, or has an unknown or invalid setting.
        """
        try:
            given = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read settings from {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not valid TOML: byte {error.start} is "
                f"{error.object[error.start]:#04x}; expected text in UTF-8"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        islands = given.pop("islands", DEFAULT_ISLANDS)
        _check(path, given)
        for name in ("timeline", "log_folder", "certificate", "certificate_key"):
            if name in given:
                given[name] = Path(given[name])
        for name in ("input_modules", "custom_calls", "allow_users"):
            if name in given:
                given[name] = tuple(given[name])
        given["input_path"] = tuple(map(Path, given.get("input_path", ())))
        islands = changes.pop("islands", islands)
        given |= changes
        if given.get("on", "local") != "local":
            given.setdefault("data_plane", "tcp")
        try:
            if isinstance(islands, str):
                return cls.parse(islands, **given)
            if isinstance(islands, dict):
                raise ConfigError(
                    "islands is one table [islands]; expected '2x1x4' or [[islands]] tables, one "
                    "for each island; write [[islands]] with two brackets"
                )
            if not isinstance(islands, list):
                shown = _as_toml(islands)
                raise ConfigError(f"islands is {shown}; expected '2x1x4' or [[islands]] tables")
            if not islands:
                raise ConfigError(
                    f"islands is []; expected at least one [[islands]] table, or such as "
                    f"{DEFAULT_ISLANDS!r}"
                )
            return cls(islands=tuple(map(_read_island, islands)), **given)
        except ConfigError as error:
            options = " and options" if changes else ""
            raise ConfigError(f"{path}{options}: {error}") from error


TABLE = "an [[islands]] table needs hosts and devices, and may have prefix, address and channels"
CHANNEL = "a channel has address and rate, such as {address = '10.0.0.1', rate = '10Gbit/s'}"


def _read_island(table: Any) -> IslandSettings:
    """Reads one ``[[islands]]`` table.

    Raises:
        ConfigError: it is invalid.
    """
    _check_table(table, IslandSettings, ("hosts", "devices"), TABLE)
    given = dict(table)
    for name in ("prefix", "channels"):
        if not isinstance(given.get(name, []), list):
            raise ConfigError(f"{name} is {given[name]!r}; expected a list; {TABLE}")
    for channel in given.get("channels", ()):
        _check_table(channel, ChannelSettings, ("address", "rate"), CHANNEL)
    prefix = tuple(given.pop("prefix", ()))
    channels = tuple(ChannelSettings(**channel) for channel in given.pop("channels", ()))
    return IslandSettings(**given, prefix=prefix, channels=channels)


def _check_table(table: Any, kind: Any, needed: tuple[str, ...], expected: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"an entry of islands is {table!r}; {expected}")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in table:
        if name not in known:
            raise ConfigError(f"there is no {name!r} here; {expected}")
    for name in needed:
        if name not in table:
            raise ConfigError(f"it has no {name}; {expected}")


def _check_island(number: int, island: IslandSettings) -> None:
    """Validates an island.

    Raises:
        ConfigError: names the attribute, its value and what was expected.
    """
    for name in ("hosts", "devices"):
        count = getattr(island, name)
        if type(count) is not int or not 1 <= count <= COUNT_MAX:
            shown = reprlib.repr(count)
            raise ConfigError(
                f"islands: island {number}: {name} is {shown}; expected a whole number of 1 to "
                f"{COUNT_MAX}"
            )
    if not isinstance(island.prefix, tuple) or not all(isinstance(w, str) for w in island.prefix):
        raise ConfigError(
            f"islands: island {number}: prefix is {island.prefix!r}; expected words of a command"
        )
    for name, text in (
        ("address", island.address),
        *(("address of a channel", channel.address) for channel in island.channels),
    ):
        for rank in range(island.hosts):
            try:
                ipaddress.ip_address(_of_rank(text, rank))
            except (ValueError, AttributeError):
                raise ConfigError(
                    f"islands: island {number}: {name} is {text!r}; expected a numeric address, in "
                    f"which {RANK} may stand for the host's number"
                ) from None
    for channel in island.channels:
        _ = channel.rate_bps
    addresses = [address for rank in range(island.hosts) for address, _ in island.channels_of(rank)]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            f"islands: island {number}: two channels of its hosts have one address; expected an "
            f"address of its own for each channel of each host ({RANK})"
        )


def _check_counts(hosts: int, devices: int) -> None:
    """Checks that one controller can handle this many hosts and devices.

    Raises:
        ConfigError: there are too many.
    """
    for count, most, of in ((hosts, HOSTS_MAX, "hosts"), (devices, DEVICES_MAX, "devices")):
        if count > most:
            raise ConfigError(
                f"islands have {count:,} {of} in all, of which a controller takes at most "
                f"{most:,}: it keeps a queue for each device and a connection to each host; try "
                "fewer, or `fairway simulate` for larger clusters"
            )


def _number_of(user: str) -> int:
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(
            f"allow_users names {user!r}, but this machine has no such user; expected names or "
            "numbers of users"
        ) from None


def _check(path: Path, given: dict[str, Any]) -> None:
    """Checks that every name is known, and every value of its type."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    examples = {
        "timeline": "run.json",
        "log_folder": "logs",
        "certificate": "controller.pem",
        "certificate_key": "controller.key",
        "input_modules": ["package"],
        "input_path": ["folder"],
    }
    examples |= {
        "allow_users": ["name"],
        "custom_calls": ["target"],
        "device_memory": "16GiB",
        "xla_flags": "--xla_...",
    }
    for name, value in given.items():
        if name not in fields or name == "islands":
            known = ", ".join(sorted(fields))
            raise ConfigError(f"{path}: there is no setting {name!r}; there are {known}")
        example = examples.get(name, fields[name].default)
        wanted = (int, float) if isinstance(example, float) else type(example)
        right = isinstance(value, wanted) and isinstance(value, bool) == isinstance(example, bool)
        if isinstance(value, list):
            right = right and all(isinstance(one, str) for one in value)
        if not right:
            shown = _as_toml(value)
            raise ConfigError(
                f"{path}: {name} is {shown}; expected a value like {_as_toml(example)}"
            )


def _as_toml(value: object) -> str:
    """Formats a value as TOML, abbreviated."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "a table" if isinstance(value, dict) else reprlib.repr(value)
