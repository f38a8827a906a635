"""The settings of a pair: what its services share, which value wins, and the ports that it chooses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hisparse_pd.base.ports import is_taken
from hisparse_pd.base.settings_sources import SettingsError, to_options
from hisparse_pd.commands import pair
from hisparse_pd.commands.pair import pair_settings
from tests.unit.servers import held_port
from tests.unit.settings_support import MODEL, file


def test_a_pair_shares_keys_and_lets_sections_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "is_taken", lambda host, port: False)
    path = file(
        tmp_path,
        """
        model_path = "/models/tiny"
        page-size = 32
        drain_timeout_secs = 7
        chunked_prefill_size = 128
        port = 8123
        [prefill]
        page_size = 16
        [decode]
        device-buffer-size = 192
        port = 31000
        [router]
        policy = "least_loaded"
        """,
    )
    _, prefill, decode, router = pair_settings({"max_running_requests": "3"}, path)
    assert (prefill.page_size, decode.page_size) == (16, 32)
    assert (prefill.chunked_prefill_size, decode.device_buffer_size) == (128, 192)
    assert prefill.drain_timeout_secs == decode.drain_timeout_secs == router.drain_timeout_secs == 7
    assert prefill.max_running_requests == decode.max_running_requests == 3
    assert (prefill.port, decode.port, router.port) == (30000, 31000, 8123)
    assert router.policy == "least_loaded"
    assert router.prefill == (("http://127.0.0.1:30000", 8998),)
    assert router.decode == ("http://127.0.0.1:31000",)


def test_the_nodes_of_a_pair_stay_on_loopback() -> None:
    _, prefill, decode, router = pair_settings({**MODEL, "host": "0.0.0.0"})
    assert (prefill.host, decode.host, router.host) == ("127.0.0.1", "127.0.0.1", "0.0.0.0")


def test_the_nodes_of_a_pair_may_have_a_gpu_each(tmp_path: Path) -> None:
    given = {**MODEL, "device": "cuda:0", "decode_device": "cuda:1"}
    for config in (None, file(tmp_path, '[decode]\ndevice = "cuda:3"')):
        _, prefill, decode, _ = pair_settings(given, config)
        assert (prefill.device, decode.device) == ("cuda:0", "cuda:1")
    with pytest.raises(SettingsError, match=r"--decode-device: .*: expected .* cpu, cuda or cuda:N"):
        pair_settings({**MODEL, "decode_device": "gpu"})


@pytest.mark.parametrize(
    ("decode", "num_tokens"),
    [
        ({}, 2 * 1000),
        ({"decode_device": "cpu", "device_pool_tokens": "300"}, 2 * (1000 + 300)),
        ({"neighbour_host_tokens": "70"}, 2 * 1000 + 70),
    ],
)
def test_the_host_cache_of_a_pair_leaves_room_for_its_decode_node(
    decode: dict[str, str], num_tokens: int
) -> None:
    given = {**MODEL, "device": "cuda", "dp_size": "2", "host_pool_tokens": "1000", **decode}
    _, prefill, _, _ = pair_settings({**given, "host_cache_tokens": "auto"})
    assert (prefill.host_cache_tokens, prefill.neighbour_host_tokens) == ("auto", num_tokens)
    assert {"--host-cache-tokens=auto", f"--neighbour-host-tokens={num_tokens}"} <= set(to_options(prefill))
    _, prefill, _, _ = pair_settings({**given, "host_cache_tokens": "640"})
    assert prefill.host_cache_tokens == 640


def test_of_a_pairs_own_options_a_section_wins_over_the_file_and_the_command_line_over_both(
    tmp_path: Path,
) -> None:
    whole_file = 'prefill_port = 31000\ndecode_port = 31001\ndecode_device = "cuda:1"\n'
    sections = '[prefill]\nport = 32000\n[decode]\nport = 32001\ndevice = "cuda:2"'
    by_option = {"prefill_port": "33000", "decode_port": "33001", "decode_device": "cuda:3"}
    for text, options, expected in (
        (whole_file, {}, (31000, 31001, "cuda:1")),
        (whole_file + sections, {}, (32000, 32001, "cuda:2")),
        (whole_file + sections, by_option, (33000, 33001, "cuda:3")),
        (whole_file, {"device": "cuda:4"}, (31000, 31001, "cuda:4")),
    ):
        _, prefill, decode, router = pair_settings({**MODEL, **options}, file(tmp_path, text))
        assert (prefill.port, decode.port, decode.device) == expected
        assert router.decode == (f"http://127.0.0.1:{decode.port}",)


def test_port_zero_of_a_pair_becomes_free_ports() -> None:
    zero = dict.fromkeys(("port", "prefill_port", "decode_port", "bootstrap_port"), "0")
    _, prefill, decode, router = pair_settings({**MODEL, **zero})
    ports = {prefill.port, prefill.bootstrap_port, decode.port, router.port}
    assert len(ports) == 4
    assert 0 not in ports
    assert router.prefill == ((f"http://127.0.0.1:{prefill.port}", prefill.bootstrap_port),)


def test_a_pair_beside_another_takes_free_ports_where_nobody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "is_taken", lambda host, port: port in (30000, 30001, 8998, 8000))
    _, prefill, decode, router = pair_settings(MODEL)
    assert len({prefill.port, prefill.bootstrap_port, decode.port, 30000, 30001, 8998}) == 6
    assert router.prefill == ((f"http://127.0.0.1:{prefill.port}", prefill.bootstrap_port),)
    assert router.decode == (f"http://127.0.0.1:{decode.port}",)
    assert router.port == 8000, "which clients know: the router says that it is taken"

    by_option = {"bootstrap_port": "8998", "prefill_port": "30000", "decode_port": "30001"}
    by_file = file(tmp_path, "bootstrap_port = 8998\n[prefill]\nport = 30000\n[decode]\nport = 30001")
    for _, prefill, decode, _ in (pair_settings(MODEL | by_option), pair_settings(MODEL, by_file)):
        assert (prefill.port, prefill.bootstrap_port, decode.port) == (30000, 8998, 30001)


def test_a_port_is_taken_while_a_server_listens_on_it() -> None:
    with held_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            assert is_taken("127.0.0.1", port)
            assert is_taken("0.0.0.0", port)
        assert not is_taken("127.0.0.1", port)
    assert not is_taken("192.0.2.1", port), "not this machine's: the node says so"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefil_port = 1", ["'prefil_port'", "did you mean prefill_port"]),
        ("[prefil]\nport = 1", ["'prefil'", "did you mean prefill"]),
        ("[decode]\nchunked_prefill_size = 1", ["[decode]", "chunked_prefill_size", "allowed"]),
        ("[router]\nprefill = []", ["[router]", "prefill"]),
        ("prefill = 7", ["prefill", "section"]),
        ("[decode]\npage_size = 0", ["[decode]", "page_size"]),
    ],
)
def test_a_mistake_in_a_pairs_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        pair_settings(MODEL, file(tmp_path, text))
    for word in words:
        assert word in str(caught.value)
