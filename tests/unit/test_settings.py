"""Settings from files and from the command line: names, precedence, bounds and error messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hisparse_pd.base.decode_settings import DecodeSettings, HisparsePolicy
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings import flag
from hisparse_pd.base.settings_sources import SettingsError, load_settings, to_options
from hisparse_pd.commands.doctor.settings import DoctorSettings
from tests import checkout
from tests.unit.settings_support import MODEL, file, parsed


def assert_refused(model: type[BaseModel], options: Mapping[str, Any], message: str) -> None:
    """Assert that settings are refused with this message, which names options as they can be typed."""
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(model, options)
    named = [name for name in model.model_fields if "_" in name and name in str(caught.value)]
    assert not named


MODELS = (PrefillSettings, DecodeSettings, RouterSettings, DoctorSettings)
FOLDERS = ("hisparse_pd", "prefill_node", "decode_node", "router", "transfer", "protocol")


def test_texts_name_options_as_they_can_be_typed() -> None:
    """Errors, logs and helps are the strings that have spaces; docstrings are about fields."""
    fields = sorted({name for model in MODELS for name in model.model_fields if "_" in name})
    pattern = re.compile(rf"(?<![\w.]){'(' + '|'.join(fields) + ')'}(?![\w.])")
    found = list[str]()
    for name in checkout.files_of_checkout(*FOLDERS):
        if not name.endswith(".py"):
            continue
        nodes = list(ast.walk(checkout.parsed(checkout.REPO / name)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        found += [
            f"{name}:{text.lineno}: {text.value!r}"
            for text in texts
            if isinstance(text.value, str) and " " in text.value and pattern.search(text.value)
        ]
    assert not found


@pytest.mark.parametrize("model", MODELS)
def test_every_field_explains_itself(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        if name.endswith("_secs"):
            assert "seconds" in field.description, name
        if name.endswith("_bytes"):
            assert "bytes" in field.description, name


def test_the_models_name_is_that_of_the_directory_when_the_node_began(tmp_path: Path) -> None:
    """A link may point to another checkpoint while the node serves the one that it has loaded."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "model"
    link.symlink_to("first")
    settings = DecodeSettings(model_path=link)
    named = DecodeSettings(model_path=link, served_model_name="named")
    assert (settings.model_name, named.model_name) == ("first", "named")
    link.unlink()
    link.symlink_to("second")
    assert (settings.model_name, named.model_name) == ("first", "named")
    assert settings == DecodeSettings(model_path=link)
    assert DecodeSettings(model_path=link).model_name == "second"


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".yml"])
def test_a_file_may_use_dashes_or_underscores(tmp_path: Path, suffix: str) -> None:
    mark = "=" if suffix == ".toml" else ":"
    text = f'model-path{mark} "/models/tiny"\npage_size{mark} 32\nhisparse{mark} "always"\n'
    loaded = load_settings(DecodeSettings, {}, file(tmp_path, text, suffix))
    assert (loaded.model_path, loaded.page_size) == (Path("/models/tiny"), 32)
    assert loaded.hisparse is HisparsePolicy.ALWAYS


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, 'model_path = "/models/tiny"\npage_size = 32\nport = 1\n')
    loaded = load_settings(PrefillSettings, {"page_size": "16"}, path)
    assert (loaded.page_size, loaded.port) == (16, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pagesize = 32", ["settings.toml", "'pagesize', did you mean page_size", "device_pool_tokens"]),
        ("page_size = 0", ["page_size: 0: expected an integer (at least 1, at most 65536)"]),
        ("page_size = true", ["page_size", "INT"]),
        ("debug_checks = 3", ["debug_checks: 3: expected true or false"]),
        ('device = "gpu"', ["device: 'gpu': expected the device of the model", "cpu, cuda or cuda:N"]),
        ('numa = "first"', ["numa: 'first': expected the NUMA node", "off: nothing is placed"]),
        (
            f'same_host_dir = "{"d" * 65}"',
            ["same_host_dir", "expected the directory", "(at most 64 characters)"],
        ),
        ('allowed_peers = ["a/b"]', ["allowed_peers: 'a/b' is neither an address nor a network"]),
        ("page_size = 64.5", ["page_size: 64.5: expected an integer (at least 1, at most 65536)"]),
        (
            'hisparse = "alwys"',
            ["hisparse: 'alwys': expected one of auto, always, never, did you mean always?"],
        ),
        ("page_size = 1\npage-size = 2", ["page_size", "twice"]),
        ("page_size = ", ["settings.toml", "Invalid value"]),
        ('kv_cache_dtype = ["auto"]', ["kv_cache_dtype"]),
        ("mem_fraction_static = 1.0", ["mem_fraction_static: 1.0: expected a number (above 0, below 1)"]),
        ("device_pool_tokens = 0", ["--device-pool-tokens 0", "this node is on cpu", "give a number"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_what_is_allowed(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(DecodeSettings, MODEL, file(tmp_path, text))
    for word in words:
        assert word in str(caught.value)
    assert "Input should" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"control_port": "8995", "dp_size": "4"},
            "to 8998, and --bootstrap-port 8998 is among them",
        ),
        ({"control_port": "30000"}, "ports up to 30000, and --port 30000 is among them"),
        ({"control_port": "65530", "dp_size": "8"}, "ports up to 65537, and the highest port is 65535"),
        ({"kv_pool_tokens": "10"}, "--kv-pool-tokens 10 must be at least --page-size 64"),
        ({"host_cache_tokens": "10"}, "--host-cache-tokens 10 must be 0 or at least --page-size 64"),
        (
            {"host_cache_tokens": "auto"},
            "--host-cache-tokens auto: the KV pool of a node on cpu is in main memory",
        ),
        (
            {"host_cache_tokens": "all"},
            r"^--host-cache-tokens: 'all': expected an integer \(at least 0, at most \d{13}\) or auto$",
        ),
        (
            {"host_cache_tokens": "auto", "device": "cuda", "disable_prefix_cache": True},
            "--host-cache-tokens auto keeps what the prefix cache has",
        ),
        ({"kv_store": "store:50051"}, "there is none; give --host-cache-tokens, too"),
        (
            {"kv_store": "store", "host_cache_tokens": "640"},
            "--kv-store 'store': expected HOST:PORT with a port in 1 to 65535",
        ),
    ],
)
def test_rules_over_two_fields_are_checked_before_the_model_is_loaded(
    options: dict[str, str], message: str
) -> None:
    assert_refused(PrefillSettings, {**MODEL, **options}, message)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("{", {}, "--kv-events-config: Invalid JSON: .*; expected a JSON object such as {"),
        ('{"publisher": "nats"}', {}, "--kv-events-config: publisher: Input should be 'null' or 'zmq'"),
        ('{"topics": "a"}', {}, "--kv-events-config: unknown key 'topics'; allowed: publisher, .*, topic$"),
        ('{"buffer_steps": 0}', {}, "--kv-events-config: buffer_steps: .* greater than or equal to 1"),
        (
            '{"endpoint": "udp://*:1"}',
            {},
            r"endpoint: 'udp://\*:1' is neither tcp://HOST:PORT nor ipc://PATH",
        ),
        ('{"endpoint": "tcp://*:65535"}', {"dp_size": "2"}, "takes the ports up to 65536"),
        ('{"endpoint": "ipc:///tmp/x"}', {"dp_size": "2"}, "ipc:///tmp/x with 2 ranks: give a tcp://"),
        (
            '{"replay_endpoint": "tcp://*:5558"}',
            {"dp_size": "2"},
            "take the same port; put them further apart",
        ),
        ('{"replay_endpoint": "tcp://*:5557"}', {}, "take the same port"),
        ('{"publisher": "zmq"}', {"disable_prefix_cache": True}, "--disable-prefix-cache turns off"),
    ],
)
def test_kv_events_that_cannot_be_published_are_named(
    value: str, options: dict[str, Any], message: str
) -> None:
    assert_refused(DecodeSettings, {**MODEL, "kv_events_config": value, **options}, message)


def test_each_rank_publishes_kv_events_at_ports_of_its_own() -> None:
    value = '{"publisher": "zmq", "endpoint": "tcp://[::]:5557", "replay_endpoint": "tcp://*:5561", "hwm": 5}'
    loaded = load_settings(PrefillSettings, {**MODEL, "dp_size": "4", "kv_events_config": value})
    assert loaded.kv_events.of_rank(0) == loaded.kv_events
    third = loaded.kv_events.of_rank(3)
    assert (third.endpoint, third.replay_endpoint, third.hwm) == ("tcp://[::]:5560", "tcp://*:5564", 5)
    assert third.binds
    assert not load_settings(PrefillSettings, MODEL).kv_events.is_on
    open_node = load_settings(PrefillSettings, {**MODEL, "host": "10.0.0.1", "kv_events_config": value})
    assert "subscribers of its KV events read the prompts' token ids" in str(open_node.exposure)


def test_each_rank_has_its_control_port_and_its_threads() -> None:
    ranks = {**MODEL, "control_port": "8994", "dp_size": "4"}
    assert load_settings(PrefillSettings, ranks).of_rank(3).control_port == 8997
    assert load_settings(PrefillSettings, {**ranks, "num_threads": "5"}).of_rank(3).num_threads == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": "2"}, "--dp-size 1 must be a multiple of --nnodes 2"),
        ({"nnodes": "2", "dp_size": "4"}, "--nnodes 2 with --dist-init-addr '': .* needs both"),
        ({"dp_size": "4", "dist_init_addr": "10.0.0.1:20000"}, "--nnodes 1 with .* single machine neither"),
        ({"node_rank": "1"}, "--node-rank 1 must be below --nnodes 1"),
        *(
            ({"nnodes": "2", "dp_size": "4", "dist_init_addr": address}, f"--dist-init-addr '{shown}': {why}")
            for address, shown, why in (
                ("0.0.0.0:20000", r"0\.0\.0\.0:20000", "expected HOST:PORT of a machine"),
                ("20000", "20000", "expected HOST:PORT of a machine"),
                ("10.0.0.1", r"10\.0\.0\.1", "expected HOST:PORT of a machine"),
                ("first:x", "first:x", "the port must be from 1 to 65531"),
                ("first:65532", "first:65532", "the port must be from 1 to 65531"),
            )
        ),
    ],
)
def test_machines_of_a_node_are_checked(options: dict[str, str], message: str) -> None:
    assert_refused(DecodeSettings, {**MODEL, **options}, message)


def test_each_machine_has_its_ranks_and_gpus() -> None:
    node = {**MODEL, "nnodes": "2", "dp_size": "6", "dist_init_addr": "[fd00::1]:20000", "device": "cuda:1"}
    first, second = (load_settings(DecodeSettings, {**node, "node_rank": rank}) for rank in ("0", "1"))
    assert (first.ranks_here, second.ranks_here) == (range(3), range(3, 6))
    assert first.dist_init_host_port == ("fd00::1", 20000)
    assert [second.of_rank(rank).device for rank in second.ranks_here] == ["cuda:1", "cuda:2", "cuda:3"]
    assert first.of_all_machines == second.of_all_machines
    assert {"dp_size", "page_size", "max_running_requests"} <= first.of_all_machines.keys()
    for rank in second.ranks_here:  # an engine knows the GPUs of the ranks beside it
        assert second.of_rank(rank).devices_here(rank) == ["cuda:1", "cuda:2", "cuda:3"]


@pytest.mark.parametrize(
    ("numa", "dp_size", "message"),
    [
        ("auto", "4", ""),
        ("off", "4", ""),
        ("1", "4", ""),
        ("0,0,1,1", "4", ""),
        (
            "0,1",
            "4",
            "--numa '0,1' names 2 nodes, and this machine has 4 ranks; name one node for all",
        ),
        ("0,1", "1", "--numa '0,1' names 2 nodes, and this machine has 1 ranks"),
        ("socket1", "1", "numa"),
        ("-1", "1", "numa"),
        ("1,", "1", "numa"),
    ],
)
def test_numa_nodes_are_named_once_or_for_each_rank(numa: str, dp_size: str, message: str) -> None:
    options = {**MODEL, "numa": numa, "dp_size": dp_size}
    if not message:
        assert load_settings(DecodeSettings, options).numa == numa
        assert "numa" not in load_settings(DecodeSettings, options).of_all_machines
        return
    assert_refused(DecodeSettings, options, message)


@pytest.mark.parametrize(
    ("model", "name"), [(PrefillSettings, "kv_pool_tokens"), (DecodeSettings, "device_pool_tokens")]
)
def test_a_pool_may_take_what_a_gpu_has_free(model: type[BaseModel], name: str) -> None:
    for device in ("cuda", "cuda:1"):
        assert getattr(load_settings(model, {**MODEL, name: "0", "device": device}), name) == 0
    message = f"{flag(name)} 0: .* --device cuda only, and this node is on cpu"
    assert_refused(model, {**MODEL, name: "0"}, message)
    with pytest.raises(SettingsError, match=r"'-1': expected an integer \(at least 0, "):
        load_settings(model, {**MODEL, name: "-1", "device": "cuda"})


@pytest.mark.parametrize("most", [1, 3, 7, 64, 100, 256, 300])
def test_graphs_hold_every_batch_unless_told(most: int) -> None:
    options = {**MODEL, "max_running_requests": most}
    sizes = load_settings(DecodeSettings, options).graph_batches
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert load_settings(DecodeSettings, {**options, "cuda_graph_max_bs": "1000"}).graph_batches == sizes
    assert load_settings(DecodeSettings, {**options, "cuda_graph_max_bs": "2"}).graph_batches == sizes[:2]
    assert load_settings(DecodeSettings, {**options, "cuda_graph_max_bs": "0"}).graph_batches == []


def test_up_to_seven_drafts_in_pages_that_hold_a_step_s_positions() -> None:
    options = {**MODEL, "speculative_num_steps": "7"}
    assert load_settings(DecodeSettings, {**options, "page_size": "8"}).speculative_num_steps == 7
    message = "--speculative-num-steps 7 needs a --page-size of at least 8, and it"
    assert_refused(DecodeSettings, {**options, "page_size": "7"}, message)
    with pytest.raises(SettingsError, match=r"--speculative-num-steps: '8': .* at most 7\)"):
        load_settings(DecodeSettings, {**MODEL, "speculative_num_steps": "8"})


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{}"), ("a.toml", "\xff"), ("a.yaml", "- 1"), ("a.yaml", "a: [")]
)
def test_an_unreadable_file_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=name):
        load_settings(DecodeSettings, MODEL, tmp_path / name)


@pytest.mark.parametrize("model", [PrefillSettings, DecodeSettings])
def test_a_node_that_binds_every_address_names_the_one_for_its_peers(model: type[BaseModel]) -> None:
    for host in ("0.0.0.0", "::", "*", ""):
        with pytest.raises(SettingsError, match="--advertise-host") as caught:
            load_settings(model, {**MODEL, "host": host})
        assert repr(host) in str(caught.value)
        with pytest.raises(SettingsError, match="--advertise-host"):
            load_settings(model, {**MODEL, "advertise_host": host, "host": host})
        assert load_settings(model, {**MODEL, "host": host, "advertise_host": "10.0.0.1"})


def test_settings_are_frozen() -> None:
    loaded = load_settings(PrefillSettings, MODEL)
    with pytest.raises(ValidationError):
        loaded.page_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "given_prefill",
    [["http://a:1"], [["http://a:1"]], [["http://a:1", "7"]], [["http://a:1", 7], "http://b:2"]],
)
def test_prefill_nodes_may_name_their_bootstrap_port(given_prefill: list[Any]) -> None:
    loaded = load_settings(RouterSettings, {"prefill": given_prefill, "decode": ["http://c:3"]})
    port = 7 if "7" in str(given_prefill) else None
    assert loaded.prefill[0] == ("http://a:1", port)
    assert len(loaded.prefill) == len(given_prefill)


@pytest.mark.parametrize("entry", [["http://a:1", "x"], ["http://a:1", "1", "2"], []])
def test_a_malformed_prefill_node_is_refused(entry: list[str]) -> None:
    with pytest.raises(SettingsError, match="--prefill"):
        load_settings(RouterSettings, {"prefill": [entry], "decode": ["http://c:3"]})


# --- options and settings are one ----------------------------------------------------------------------


_PATHS = st.sampled_from([Path("/m"), Path("a b"), Path("-odd")])
_URLS = st.sampled_from(["http://a:1", "http://[::1]:2"])
_DECODE = st.builds(
    DecodeSettings,
    model_path=_PATHS,
    hisparse=st.sampled_from(HisparsePolicy),
    page_size=st.integers(1, 65536),
    debug_checks=st.booleans(),
    control_key_file=st.none() | _PATHS,
    served_model_name=st.text("ab =é", max_size=5),
    dtype=st.sampled_from(["auto", "bfloat16"]),
    mem_fraction_static=st.floats(0, 1, exclude_min=True, exclude_max=True),
)
_ROUTER = st.builds(
    RouterSettings,
    prefill=st.lists(st.tuples(_URLS, st.none() | st.integers(0, 9)), min_size=1, max_size=3).map(tuple),
    decode=st.lists(_URLS, min_size=1, max_size=3).map(tuple),
    policy=st.sampled_from(["round_robin", "least_loaded"]),
)


@pytest.mark.parametrize(("command", "originals"), [("decode", _DECODE), ("router", _ROUTER)])
@settings(derandomize=True, max_examples=50)
@given(st.data())
def test_options_give_the_same_settings_again(
    command: str, originals: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    original = data.draw(originals)
    assert load_settings(type(original), parsed(command, to_options(original))) == original
