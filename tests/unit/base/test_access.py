"""Lists of peers, and warnings about what a service opens to other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.access import MAX_NETWORKS, PeerList, is_host, is_loopback
from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings_sources import SettingsError, load_settings, to_options
from hisparse_pd.commands.pair import pair_settings
from tests.unit.settings_support import parsed

NODES: list[type[NodeSettings]] = [PrefillSettings, DecodeSettings]


def test_who_is_in_a_list() -> None:
    peers = PeerList.parse(["10.0.0.0/24", "192.0.2.7", "2001:db8::/32", "fe80::/64"])
    inside = ("10.0.0.1", "192.0.2.7", "::ffff:10.0.0.1", "2001:db8::5", "[2001:db8::5]", "fe80::1%eth0")
    assert [peers.why_refused(address) for address in inside] == [None] * len(inside)
    for outside in ("10.0.1.1", "192.0.2.8", "::ffff:10.0.1.1", "2001:db9::5", "prefill.example", "", "unix"):
        assert not peers.allows(outside)
        why = str(peers.why_refused(outside))
        assert repr(outside) in why
        assert "10.0.0.0/24, 192.0.2.7, 2001:db8::/32" in why


def test_an_empty_list_allows_everybody() -> None:
    assert not PeerList()
    assert PeerList().allows("10.0.0.1")
    assert PeerList().allows("anything")


@pytest.mark.parametrize(
    "entry", ["", "10.0.0", "10.0.0.1/24", "10.0.0.0/33", "prefill.example", "*", "::1/129"]
)
def test_a_bad_entry_is_named_with_its_option(entry: str) -> None:
    with pytest.raises(SettingsError, match="--allowed-peers") as caught:
        load_settings(PrefillSettings, {"model_path": "/m", "allowed_peers": ["10.0.0.0/8", entry]})
    assert repr(entry) in str(caught.value)


def test_a_list_has_a_bound() -> None:
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(MAX_NETWORKS + 1)]
    with pytest.raises(SettingsError, match=f"{MAX_NETWORKS} at most"):
        load_settings(PrefillSettings, {"model_path": "/m", "allowed_peers": addresses})


def test_the_option_takes_several_and_is_repeatable() -> None:
    options = ["--model-path", "/m", "--allowed-peers", "10.0.0.0/8", "::1", "--allowed-peers", "192.0.2.7"]
    settings = load_settings(DecodeSettings, parsed("decode", options))
    assert settings.allowed_peers == ("10.0.0.0/8", "::1", "192.0.2.7")
    assert load_settings(DecodeSettings, parsed("decode", to_options(settings))) == settings


def test_what_a_host_is() -> None:
    hosts = ("prefill-0.cluster.local", "prefill_0", "10.0.0.1", "::1", "fe80::1%eth0")
    others = (
        *("", "a b", "a/b", "a:80", "user@host", "host?x", "host#x", "a\n", "-a", "[::1]", "::1%a/b"),
        *("\u00e4", "a" * 254),
    )
    assert [text for text in (*hosts, *others) if is_host(text)] == list(hosts)


# --- what is open to whom ----------------------------------------------------------------------------------


def test_by_default_every_service_stays_on_this_machine() -> None:
    nodes = [model(model_path=Path("/m")) for model in NODES]
    router = RouterSettings(prefill=(("http://a:1", None),), decode=("http://b:2",))
    _, *of_pair = pair_settings({"model_path": "/m"})
    services: list[Any] = [*nodes, router, *of_pair]
    for settings in services:
        assert settings.host == "127.0.0.1"
        assert settings.exposure is None
    assert {node.reachable_host for node in nodes} == {"127.0.0.1"}


def test_which_addresses_are_this_machine_alone() -> None:
    loopback = ("127.0.0.1", "127.9.9.9", "::1", "localhost")
    for host in (*loopback, "0.0.0.0", "::", "10.0.0.1", "prefill.example"):
        assert is_loopback(host) == (host in loopback)
        # Peers cannot connect to every address of a machine, so a node that binds it names another one.
        advertised = "127.0.0.1" if host in ("0.0.0.0", "::") else ""
        settings = PrefillSettings(model_path=Path("/m"), host=host, advertise_host=advertised)
        assert (settings.exposure is None) == (host in loopback)


PROTECTED: dict[str, Any] = {
    "api_key_file": Path("/keys/api"),
    "control_key_file": Path("/keys/control"),
    "allowed_peers": ("10.0.0.0/24",),
}


@pytest.mark.parametrize("model", NODES)
@pytest.mark.parametrize("missing", [*PROTECTED, None])
def test_an_open_node_is_warned_of_once_with_the_options_that_it_lacks(
    model: type[NodeSettings], missing: str | None
) -> None:
    given = {name: value for name, value in PROTECTED.items() if name != missing}
    warning = model(model_path=Path("/m"), host="10.0.0.1", **given).exposure
    if missing is None:
        assert warning is None
        return
    assert warning is not None
    assert "10.0.0.1" in warning
    for name in PROTECTED:
        assert (f"--{name.replace('_', '-')}" in warning) == (name == missing)


def test_a_node_that_is_only_reached_elsewhere_is_open_too() -> None:
    warning = DecodeSettings(model_path=Path("/m"), advertise_host="10.0.0.1").exposure
    assert warning is not None
    assert "at 10.0.0.1:" in warning


def test_an_open_router_is_warned_of() -> None:
    given: dict[str, Any] = {"prefill": (("http://a:1", None),), "decode": ("http://b:2",), "host": "0.0.0.0"}
    warning = RouterSettings(**given).exposure
    assert warning is not None
    assert "--api-key-file" in warning
    assert RouterSettings(**given, api_key_file=Path("/keys/api")).exposure is None


# --- the keys of a pair ---------------------------------------------------------------------------------


def test_one_api_key_file_serves_a_pair() -> None:
    _, prefill, decode, router = pair_settings({"model_path": "/m", "api_key_file": "/keys/api"})
    files = {prefill.api_key_file, decode.api_key_file, router.api_key_file, router.node_api_key_file}
    assert files == {Path("/keys/api")}


def test_the_nodes_of_a_pair_may_have_a_key_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    path.write_text(
        'model_path = "/m"\n[prefill]\napi_key_file = "/keys/node"\n[decode]\napi_key_file = "/keys/node"\n'
    )
    _, prefill, _, router = pair_settings({}, path)
    assert prefill.api_key_file == router.node_api_key_file == Path("/keys/node")
    assert router.api_key_file is None
    _, _, _, router = pair_settings({"node_api_key_file": "/keys/mine"}, path)
    assert router.node_api_key_file == Path("/keys/mine")
