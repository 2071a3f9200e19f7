"""What NVSHMEM is told about the network: its variables, made from those that NCCL is given.

A cluster describes its fabric once, in NCCL_IB_*: which cards, which GID, which traffic class. Who
sets them for NCCL means them for every library (DeepEP#724), so the network backend passes them on.
A variable of NVSHMEM's own that the user has set always wins.

Names and forms are those of NCCL's and NVSHMEM's pages on environment variables; what they leave
open was read in the sources of NCCL 2.30 and NVSHMEM 3.4.5. Two differences matter: NCCL takes a
name of a card for a prefix unless it begins with "=", NVSHMEM takes it whole; and NVSHMEM has no
variable for timeout, retries and partition key.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CARDS = "NCCL_IB_HCA"
CARD_PREFIX = "mlx5"  # cards that NVSHMEM looks at unless NVSHMEM_HCA_PREFIX says otherwise
GID_INDEX = "NVSHMEM_IB_GID_INDEX"

# How the ranks find each other at the start. NVSHMEM reads the values as NCCL does: prefixes of
# interfaces, ^ excludes them, = takes whole names.
SOCKET_VARIABLES = {
    "NCCL_SOCKET_IFNAME": "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
    "NCCL_SOCKET_FAMILY": "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY",
}

# Both filter the cards by themselves; NVSHMEM_ENABLE_NIC_PE_MAPPING only decides whether a GPU
# gets the nearest of those that are left (unset) or one by its number.
_CARD_VARIABLES = ("NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING")


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE card.

    Attributes:
        card: name of the device, such as mlx5_0.
        number: from 1.
        link_layer: "InfiniBand", or "Ethernet" for RoCE.
        active: the link is up.
        gids: indices of the GID table that hold an address.
    """

    card: str
    number: int
    link_layer: str = "InfiniBand"
    active: bool = True
    gids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.card}:{self.number}"


@dataclass(frozen=True)
class Setting:
    """A variable as NVSHMEM gets it, and where its value comes from.

    Attributes:
        source: the variable that the user set, or a few words.
    """

    variable: str
    value: str
    source: str


@dataclass(frozen=True)
class Fabric:
    """How the network backend uses the network.

    Attributes:
        settings: what NVSHMEM is told.
        unheard: a sentence for each thing that NCCL is told and NVSHMEM cannot be.
    """

    settings: tuple[Setting, ...]
    unheard: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """The variables to add to the environment before NVSHMEM starts."""
        return {s.variable: s.value for s in self.settings if s.source != s.variable}


def choose_fabric(environment: Mapping[str, str], ports: Sequence[Port]) -> Fabric:
    """Make NVSHMEM's settings from the user's.

    Args:
        environment: variables, those of ``nccl_files`` included.
        ports: of this machine, as ``read_ports`` finds them; none where they are not known.

    Returns:
        Fabric: the settings, those that the user made for NVSHMEM included.

    Raises:
        ValueError: a value cannot be parsed, or names no card of this machine; the text has both.
    """
    given = {name: value for name, value in environment.items() if value}  # empty is unset
    settings, unheard = [], []
    for theirs, ours, read in _SHARED:
        if ours in given:
            settings.append(Setting(ours, given[ours], ours))
        elif theirs in given and (value := read(theirs, given[theirs])) is not None:
            settings.append(Setting(ours, value, theirs))
    for theirs, (low, high, fixed) in _FIXED.items():
        if theirs in given and (value := _integer(theirs, given[theirs], low, high)) != fixed:
            unheard.append(f"{theirs}={value}, but NVSHMEM has no variable for it and uses {fixed}")
    if _integer("NCCL_IB_DISABLE", given.get("NCCL_IB_DISABLE", "0"), 0, 1):
        unheard.append(
            "NCCL_IB_DISABLE=1 keeps NCCL off the cards; several nodes need them, so they are used"
        )
    settings += _choose_cards(given, [port for port in ports if port.active], unheard)
    return Fabric(tuple(settings), tuple(unheard))


def network_environment(
    environment: Mapping[str, str],
    *,
    channels: int,
    queue_depth: int,
    heap_bytes: int,
    ports: Sequence[Port],
) -> dict[str, str]:
    """The variables that NVSHMEM starts with, but those that the user has set.

    Args:
        environment: variables, those of ``nccl_files`` included.
        channels: blocks that send to a rail peer, each on a queue pair of its own.
        queue_depth: entries that such a queue must hold.
        heap_bytes: of the symmetric heap, where it cannot grow.
        ports: of this machine, as ``read_ports`` finds them.

    Raises:
        ValueError: as ``choose_fabric``.
    """
    wanted = {
        "NVSHMEM_DISABLE_NVLS": "1",  # multicast is not used, and is not there in every container
        **choose_fabric(environment, ports).environment(),
    }
    for nccl, nvshmem in SOCKET_VARIABLES.items():
        if environment.get(nccl):
            wanted[nvshmem] = environment[nccl]
    if environment.get("NVSHMEM_DISABLE_CUDA_VMM") == "1":
        wanted["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes)
    if any(port.active for port in ports):
        wanted |= {
            "NVSHMEM_IB_ENABLE_IBGDA": "1",
            "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(channels),
            "NVSHMEM_IBGDA_RC_MAP_BY": "cta",
            "NVSHMEM_QP_DEPTH": str(queue_depth),
        }
    else:  # one host: the proxy thread has nothing to send, and would keep a core per rank busy
        wanted["NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"] = "1"
    return {name: value for name, value in wanted.items() if not environment.get(name)}


# ---- values


def _integer(name: str, text: str, low: int, high: int) -> int:
    """As C reads it: decimal, 0x and octal."""
    if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text):
        value = int(text, 16 if "x" in text.lower() else 8 if re.match("[+-]?0", text) else 10)
        if low <= value <= high:
            return value
    raise ValueError(f"{name} must be an integer from {low} to {high}, got {text!r}")


def _index(low: int, high: int) -> Callable[[str, str], str | None]:
    """Reads an integer; -1 leaves the choice to the library."""

    def read(name: str, text: str) -> str | None:
        value = _integer(name, text, low, high)
        return None if value == -1 else str(value)

    return read


def _family(name: str, text: str) -> str:
    if text not in ("AF_INET", "AF_INET6"):
        raise ValueError(f"{name} must be AF_INET or AF_INET6, got {text!r}")
    return text


def _range(name: str, text: str) -> str:
    try:
        if "/" not in text:
            raise ValueError("there is no /")
        ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        form = "addresses in the form of CIDR, such as 10.0.0.0/8 or fd00::/16"
        raise ValueError(f"{name} must be {form}, got {text!r} ({error})") from error
    return text


_SHARED: tuple[tuple[str, str, Callable[[str, str], str | None]], ...] = (
    ("NCCL_IB_GID_INDEX", GID_INDEX, _index(-1, 255)),
    ("NCCL_IB_ADDR_FAMILY", "NVSHMEM_IB_ADDR_FAMILY", _family),
    ("NCCL_IB_ADDR_RANGE", "NVSHMEM_IB_ADDR_RANGE", _range),
    ("NCCL_IB_ROCE_VERSION_NUM", "NVSHMEM_IB_ROCE_VERSION_NUM", _index(1, 2)),
    ("NCCL_IB_TC", "NVSHMEM_IB_TRAFFIC_CLASS", _index(-1, 255)),
    ("NCCL_IB_SL", "NVSHMEM_IB_SL", _index(-1, 15)),
)
# What NVSHMEM's transports have built in: lowest and highest value, and theirs.
_FIXED = {
    "NCCL_IB_TIMEOUT": (0, 255, 20),  # 0, and from 32 on: for ever
    "NCCL_IB_RETRY_CNT": (0, 7, 7),
    "NCCL_IB_PKEY": (0, 65535, 0),
}


# ---- cards


@dataclass(frozen=True)
class CardFilter:
    """NCCL_IB_HCA: ``[^][=]<card>[:<port>[:<rail>[:<plane>]]],...``.

    Attributes:
        exclude: the list says which cards are not used.
        exact: names are whole names, else prefixes.
        cards: name and port of each entry; None is every port.
        rails: an entry has a rail or a plane.
    """

    exclude: bool
    exact: bool
    cards: tuple[tuple[str, int | None], ...]
    rails: bool = False

    def allows(self, port: Port) -> bool:
        """Whether NCCL would use the port."""
        listed = any(
            (port.card == card if self.exact else port.card.startswith(card))
            and number in (None, port.number)
            for card, number in self.cards
        )
        return listed != self.exclude


def parse_cards(text: str) -> CardFilter:
    """Read a list of cards as NCCL does; ValueError where it would have to guess."""
    exclude = text.startswith("^")
    exact = text[exclude:].startswith("=")
    form = "[^][=]card[:port[:rail[:plane]]],..."
    cards, rails = [], False
    for entry in filter(None, text[exclude + exact :].split(",")):
        card, *numbers = entry.split(":")
        if not card or len(numbers) > 3 or not all(re.fullmatch(r"\d*", n) for n in numbers):
            raise ValueError(f"{CARDS} must have the form {form}, got {text!r} with {entry!r}")
        cards.append((card, int(numbers[0]) if numbers and numbers[0] else None))
        rails |= any(numbers[1:])
    if not cards:
        raise ValueError(f"{CARDS} must name a card, in the form {form}, got {text!r}")
    return CardFilter(exclude, exact, tuple(cards), rails)


def _choose_cards(
    given: Mapping[str, str], ports: Sequence[Port], unheard: list[str]
) -> Iterator[Setting]:
    own = [Setting(name, given[name], name) for name in _CARD_VARIABLES if name in given]
    used = list(ports)
    if own:
        yield from own
    elif CARDS in given:
        wanted = parse_cards(given[CARDS])
        if wanted.rails:
            unheard.append(f"{CARDS} assigns rails or planes, which NVSHMEM does not know")
        used = [port for port in ports if wanted.allows(port)]
        if ports and not used:
            raise ValueError(
                f"{CARDS} must leave an active port of this machine "
                f"({', '.join(map(str, ports))}), got {given[CARDS]!r}"
            )
        if wanted.exact:  # means the same to both
            names = ",".join(card if n is None else f"{card}:{n}" for card, n in wanted.cards)
            yield Setting("NVSHMEM_HCA_LIST", "^" * wanted.exclude + names, CARDS)
        elif used:
            yield Setting("NVSHMEM_HCA_LIST", ",".join(map(str, used)), CARDS)
        else:
            unheard.append(
                f"{CARDS}={given[CARDS]} gives prefixes, and this machine has no card to compare"
            )
    if "NVSHMEM_HCA_PREFIX" in given:
        yield Setting("NVSHMEM_HCA_PREFIX", given["NVSHMEM_HCA_PREFIX"], "NVSHMEM_HCA_PREFIX")
    elif others := [port.card for port in used if CARD_PREFIX not in port.card]:
        prefixes = {re.match(r"\D*", port.card)[0] for port in used}
        if len(prefixes) == 1:
            yield Setting("NVSHMEM_HCA_PREFIX", prefixes.pop(), "the names of the cards")
        else:
            unheard.append(
                f"NVSHMEM uses cards of one prefix, {CARD_PREFIX}, so not {', '.join(others)}: "
                f"NVSHMEM_HCA_PREFIX names another, {CARDS} chooses among the cards"
            )


# ---- what the machine says


def read_ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """The ports of the InfiniBand and RoCE cards, from sysfs."""
    return tuple(
        Port(
            card=card.name,
            number=int(port.name),
            link_layer=_text(port / "link_layer") or "InfiniBand",
            active=_text(port / "state").endswith("ACTIVE"),
            gids=tuple(
                sorted(
                    int(gid.name)
                    for gid in _inside(port / "gids")
                    if re.search("[1-9a-f]", _text(gid))
                )
            ),
        )
        for card in _inside(root / "sys/class/infiniband")
        for port in _inside(card / "ports")
    )


def nccl_files(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """NCCL's variables from its files, where the environment does not have them.

    The user's file (NCCL_CONF_FILE, else ~/.nccl.conf) comes before the system's, /etc/nccl.conf.
    """
    own = environment.get("NCCL_CONF_FILE")
    if not own and environment.get("HOME"):
        own = f"{environment['HOME']}/.nccl.conf"
    found: dict[str, str] = {}
    for path in (*([Path(own)] if own else []), root / "etc/nccl.conf"):
        for line in _text(path).splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith("NCCL_"):
                found.setdefault(name, value)
    return {name: value for name, value in found.items() if name not in environment}


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
