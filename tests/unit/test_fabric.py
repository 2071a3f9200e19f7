"""DeepEP#724: what a user set for NCCL's network is what NVSHMEM is told; its own settings win."""

from pathlib import Path

import pytest

from hybrid_ep.backends.cuda.fabric import (
    CardFilter,
    Port,
    Setting,
    choose_fabric,
    nccl_files,
    parse_cards,
)

CARDS = [*(Port(f"mlx5_{n}", 1) for n in (0, 1, 10, 2)), Port("mlx5_2", 2)]


def told(environment: dict[str, str], ports: list[Port] = CARDS) -> dict[str, str]:
    return choose_fabric(environment, ports).environment()


def listed(value: str, ports: list[Port] = CARDS) -> str:
    return told({"NCCL_IB_HCA": value}, ports)["NVSHMEM_HCA_LIST"]


@pytest.mark.parametrize(
    ("nccl", "value", "nvshmem", "expected"),
    [
        ("NCCL_IB_GID_INDEX", "3", "NVSHMEM_IB_GID_INDEX", "3"),
        ("NCCL_IB_GID_INDEX", "0", "NVSHMEM_IB_GID_INDEX", "0"),
        ("NCCL_IB_TC", "106", "NVSHMEM_IB_TRAFFIC_CLASS", "106"),
        ("NCCL_IB_TC", "0x6a", "NVSHMEM_IB_TRAFFIC_CLASS", "106"),
        ("NCCL_IB_TC", "0X6A", "NVSHMEM_IB_TRAFFIC_CLASS", "106"),
        ("NCCL_IB_TC", "0152", "NVSHMEM_IB_TRAFFIC_CLASS", "106"),
        ("NCCL_IB_TC", "+106", "NVSHMEM_IB_TRAFFIC_CLASS", "106"),
        ("NCCL_IB_SL", "5", "NVSHMEM_IB_SL", "5"),
        ("NCCL_IB_ADDR_FAMILY", "AF_INET6", "NVSHMEM_IB_ADDR_FAMILY", "AF_INET6"),
        ("NCCL_IB_ADDR_RANGE", "10.1.0.0/16", "NVSHMEM_IB_ADDR_RANGE", "10.1.0.0/16"),
        ("NCCL_IB_ADDR_RANGE", "10.1.2.3/16", "NVSHMEM_IB_ADDR_RANGE", "10.1.2.3/16"),
        ("NCCL_IB_ADDR_RANGE", "fd00::/8", "NVSHMEM_IB_ADDR_RANGE", "fd00::/8"),
        ("NCCL_IB_ROCE_VERSION_NUM", "1", "NVSHMEM_IB_ROCE_VERSION_NUM", "1"),
    ],
)
def test_DeepEP_724_values(nccl: str, value: str, nvshmem: str, expected: str) -> None:
    fabric = choose_fabric({nccl: value}, CARDS)
    assert fabric.settings == (Setting(nvshmem, expected, nccl),)
    assert fabric.unheard == ()


@pytest.mark.parametrize("name", ["NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL"])
@pytest.mark.parametrize("value", ["-1", ""])
def test_DeepEP_724_unset_is_left_to_nvshmem(name: str, value: str) -> None:
    assert told({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("NCCL_IB_GID_INDEX", "three", "NCCL_IB_GID_INDEX must be an integer from -1 to 255"),
        ("NCCL_IB_GID_INDEX", "-2", "NCCL_IB_GID_INDEX must be an integer from -1 to 255"),
        ("NCCL_IB_TC", "256", "NCCL_IB_TC must be an integer from -1 to 255"),
        ("NCCL_IB_TC", "1 06", "NCCL_IB_TC must be"),
        ("NCCL_IB_TC", "10.6", "NCCL_IB_TC must be"),
        ("NCCL_IB_TC", "08", "NCCL_IB_TC must be"),  # octal
        ("NCCL_IB_TC", "0x", "NCCL_IB_TC must be"),
        ("NCCL_IB_SL", "16", "NCCL_IB_SL must be an integer from -1 to 15"),
        ("NCCL_IB_TIMEOUT", "long", "NCCL_IB_TIMEOUT must be an integer from 0 to"),
        ("NCCL_IB_RETRY_CNT", "8", "NCCL_IB_RETRY_CNT must be an integer from 0 to 7"),
        ("NCCL_IB_PKEY", "0xffff1", "NCCL_IB_PKEY must be an integer from 0 to 65535"),
        ("NCCL_IB_DISABLE", "yes", "NCCL_IB_DISABLE must be an integer from 0 to 1"),
        ("NCCL_IB_ADDR_FAMILY", "ipv4", "NCCL_IB_ADDR_FAMILY must be AF_INET or AF_INET6"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0", "NCCL_IB_ADDR_RANGE must be addresses in the form of"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0/33", "NCCL_IB_ADDR_RANGE must be addresses in the form"),
        ("NCCL_IB_ADDR_RANGE", "ten/8", "NCCL_IB_ADDR_RANGE must be addresses in the form of"),
        ("NCCL_IB_ROCE_VERSION_NUM", "3", "NCCL_IB_ROCE_VERSION_NUM must be an integer from 1 to"),
        ("NCCL_IB_HCA", "mlx5_0:one", "NCCL_IB_HCA must have the form [^][=]card[:port"),
        ("NCCL_IB_HCA", ":1", "NCCL_IB_HCA must have the form"),
        ("NCCL_IB_HCA", "mlx5_0:1:0:0:0", "NCCL_IB_HCA must have the form"),
        ("NCCL_IB_HCA", "mlx5_0:-1", "NCCL_IB_HCA must have the form"),
        ("NCCL_IB_HCA", "^", "NCCL_IB_HCA must name a card"),
        ("NCCL_IB_HCA", "=,", "NCCL_IB_HCA must name a card"),
        ("NCCL_IB_HCA", "=mlx5_1", "NCCL_IB_HCA must leave an active port of this machine"),
        ("NCCL_IB_HCA", "=^mlx5_0", "NCCL_IB_HCA must leave an active port of this machine"),
        ("NCCL_IB_HCA", "^mlx5", "NCCL_IB_HCA must leave an active port of this machine"),
        ("NCCL_IB_HCA", "mlx5_0:2", "NCCL_IB_HCA must leave an active port of this machine"),
    ],
)
def test_DeepEP_724_what_cannot_be_read_names_variable_and_value(
    name: str, value: str, says: str
) -> None:
    ports = [Port("mlx5_0", 1), Port("mlx5_1", 1, active=False)]
    with pytest.raises(ValueError) as raised:
        choose_fabric({name: value}, ports)
    assert str(raised.value).startswith(says)
    assert f"got {value!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # whole names mean the same to both libraries
        ("=mlx5_0:1,mlx5_1:1", "mlx5_0:1,mlx5_1:1"),
        ("=mlx5_2", "mlx5_2"),
        ("^=mlx5_1,mlx5_10:1", "^mlx5_1,mlx5_10:1"),
        # prefixes only to NCCL: here is what they choose
        ("mlx5_1", "mlx5_1:1,mlx5_10:1"),
        ("mlx5_1:1", "mlx5_1:1,mlx5_10:1"),
        ("mlx5_2", "mlx5_2:1,mlx5_2:2"),
        ("mlx5_2:2,mlx5_0", "mlx5_0:1,mlx5_2:2"),
        ("mlx5", "mlx5_0:1,mlx5_1:1,mlx5_10:1,mlx5_2:1,mlx5_2:2"),
        ("^mlx5_0", "mlx5_1:1,mlx5_10:1,mlx5_2:1,mlx5_2:2"),
        ("^mlx5_1,mlx5_2:1", "mlx5_0:1,mlx5_2:2"),
        # what NCCL lets pass
        ("mlx5_0:", "mlx5_0:1"),
        (",mlx5_0,,", "mlx5_0:1"),
    ],
)
def test_DeepEP_724_cards(value: str, expected: str) -> None:
    assert listed(value) == expected


def test_DeepEP_724_cards_that_are_down_are_not_chosen() -> None:
    ports = [Port("mlx5_0", 1, active=False), Port("mlx5_1", 1)]
    assert listed("mlx5", ports) == "mlx5_1:1"


def test_DeepEP_724_prefixes_without_cards_to_compare() -> None:
    fabric = choose_fabric({"NCCL_IB_HCA": "^mlx5_0"}, [])
    assert fabric.settings == ()
    assert fabric.unheard == (
        "NCCL_IB_HCA=^mlx5_0 gives prefixes, and this machine has no card to compare",
    )
    assert told({"NCCL_IB_HCA": "=mlx5_0:1"}, []) == {"NVSHMEM_HCA_LIST": "mlx5_0:1"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("mlx5", CardFilter(False, False, (("mlx5", None),))),
        ("=mlx5_0:1,mlx5_1", CardFilter(False, True, (("mlx5_0", 1), ("mlx5_1", None)))),
        ("^mlx5_3:2", CardFilter(True, False, (("mlx5_3", 2),))),
        ("^=mlx5_3", CardFilter(True, True, (("mlx5_3", None),))),
        ("=mlx5_0:1:0:0", CardFilter(False, True, (("mlx5_0", 1),), rails=True)),
        ("=mlx5_0::0:1", CardFilter(False, True, (("mlx5_0", None),), rails=True)),
        ("mlx5_0:::", CardFilter(False, False, (("mlx5_0", None),))),
    ],
)
def test_DeepEP_724_every_form_of_a_list_of_cards(value: str, expected: CardFilter) -> None:
    assert parse_cards(value) == expected


@pytest.mark.parametrize(
    ("own", "nccl"),
    [
        ("NVSHMEM_IB_GID_INDEX", "NCCL_IB_GID_INDEX"),
        ("NVSHMEM_IB_TRAFFIC_CLASS", "NCCL_IB_TC"),
        ("NVSHMEM_IB_SL", "NCCL_IB_SL"),
        ("NVSHMEM_IB_ADDR_FAMILY", "NCCL_IB_ADDR_FAMILY"),
        ("NVSHMEM_IB_ADDR_RANGE", "NCCL_IB_ADDR_RANGE"),
        ("NVSHMEM_IB_ROCE_VERSION_NUM", "NCCL_IB_ROCE_VERSION_NUM"),
        ("NVSHMEM_HCA_LIST", "NCCL_IB_HCA"),
        ("NVSHMEM_HCA_PE_MAPPING", "NCCL_IB_HCA"),
    ],
)
def test_DeepEP_724_nvshmems_own_setting_wins(own: str, nccl: str) -> None:
    """Whatever NCCL is told then, even something that cannot be read."""
    fabric = choose_fabric({own: "7", nccl: "?"}, CARDS)
    assert fabric.settings == (Setting(own, "7", own),)
    assert fabric.environment() == {}


def test_DeepEP_724_what_nvshmem_cannot_be_told_is_said() -> None:
    environment = {
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "5",
        "NCCL_IB_PKEY": "0x1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_IB_HCA": "=mlx5_0:1:0:0",
    }
    fabric = choose_fabric(environment, CARDS)
    assert fabric.environment() == {"NVSHMEM_HCA_LIST": "mlx5_0:1"}
    assert fabric.unheard == (
        "NCCL_IB_TIMEOUT=22, but NVSHMEM has no variable for it and uses 20",
        "NCCL_IB_RETRY_CNT=5, but NVSHMEM has no variable for it and uses 7",
        "NCCL_IB_PKEY=1, but NVSHMEM has no variable for it and uses 0",
        "NCCL_IB_DISABLE=1 keeps NCCL off the cards; several nodes need them, so they are used",
        "NCCL_IB_HCA assigns rails or planes, which NVSHMEM does not know",
    )


def test_DeepEP_724_what_nvshmem_does_anyway_is_not_worth_a_word() -> None:
    defaults = {"NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_PKEY": "0"}
    assert choose_fabric({**defaults, "NCCL_IB_DISABLE": "0"}, CARDS).unheard == ()


def test_DeepEP_724_cards_of_other_names() -> None:
    """NVSHMEM looks at cards named mlx5* unless it is told another prefix."""
    ports = [Port("ibp12s0", 1), Port("ibp41s0", 1)]
    assert told({}, ports) == {"NVSHMEM_HCA_PREFIX": "ibp"}
    assert told({"NVSHMEM_HCA_PREFIX": "ib"}, ports) == {}
    mixed = [*ports, Port("mlx5_0", 1)]
    (unheard,) = choose_fabric({}, mixed).unheard
    assert "not ibp12s0, ibp41s0" in unheard
    assert told({"NCCL_IB_HCA": "ibp"}, mixed) == {
        "NVSHMEM_HCA_LIST": "ibp12s0:1,ibp41s0:1",
        "NVSHMEM_HCA_PREFIX": "ibp",
    }
    assert told({"NCCL_IB_HCA": "=mlx5_0"}, mixed) == {"NVSHMEM_HCA_LIST": "mlx5_0"}


def test_DeepEP_724_files_of_nccl(tmp_path: Path) -> None:
    """The environment, then the user's file, then the system's; in a file the first line counts."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(
        "#NCCL_IB_PKEY=1\nNCCL_IB_TC=1\nNCCL_IB_SL=1\nNCCL_IB_HCA==mlx5_0\nLD_PRELOAD=x\nwords\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / ".nccl.conf").write_text("NCCL_IB_SL=2\nNCCL_IB_SL=3\nNCCL_IB_GID_INDEX=2\n")
    environment = {"HOME": str(home), "NCCL_IB_GID_INDEX": "0"}
    assert nccl_files(environment, tmp_path) == {
        "NCCL_IB_TC": "1",
        "NCCL_IB_SL": "2",
        "NCCL_IB_HCA": "=mlx5_0",
    }
    other = tmp_path / "other.conf"
    other.write_text("NCCL_IB_SL=4\r\n")
    environment["NCCL_CONF_FILE"] = str(other)
    assert nccl_files(environment, tmp_path)["NCCL_IB_SL"] == "4"
    assert nccl_files({}, tmp_path / "nowhere") == {}
