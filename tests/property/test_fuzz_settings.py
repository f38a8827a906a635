"""Hostile settings: files, keys, lists of peers and command lines are usable or refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from hisparse_pd.base.access import KeyFileError, PeerList, is_host
from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings_sources import SettingsError, load_settings, to_options
from hisparse_pd.commands import cli, options, pair
from hisparse_pd.protocol.channels import ControlKeys
from hisparse_pd.serving.api.keys import MIN_KEY_CHARS, ApiKeys
from tests.property.fuzzing import BATCH, batch, damage, fuzz, fuzz_batches, outcome, seeds

T = TypeVar("T")

MODELS: list[type[BaseModel]] = [PrefillSettings, DecodeSettings, RouterSettings]

TOML = b"""
model-path = "/models/tiny"
page_size = 64
prefill = [["http://a:1", 8998], "http://b:2"]
decode = ["http://c:3"]
hisparse = "auto"
allowed-peers = ["10.0.0.0/24", "::1"]
mem_fraction_static = 0.25
debug_checks = true
"""
YAML = b"""
model-path: /models/tiny
page_size: 64
prefill: [[http://a:1, 8998], http://b:2]
decode: [http://c:3]
hisparse: auto
allowed_peers: [10.0.0.0/24, "::1"]
mem_fraction_static: 0.25
debug_checks: true
"""
PAIR = b"""
model-path = "/models/tiny"
[prefill]
page_size = 16
[decode]
port = 31000
[router]
policy = "least_loaded"
"""
PARTS = (
    b"[" * 600,
    b"{a: " * 600,
    b"a = " + b"[" * 600,
    b"a.b.c.d = 1\n",
    b"\n[[x]]\n",
    b"9" * 5000,
    b"1e999",
    b"nan",
    b".inf",
    b"0x" + b"f" * 5000,
    b"2001-99-99",
    b"2001-02-03",
    b"25:61:61",
    b"!!python/object:os.system",
    b"!!binary x",
    b"&a [*a]",
    b"? [1]\n: 2\n",
    b"<<: 3\n",
    b'"\\ud800"',
    b"\xff",
    b"\x00",
    b"null",
    b"- x\n",
    b"true",
    b"-1",
    b"10.0.0.1/99",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


def load(model: type[BaseModel], path: Path, content: bytes) -> BaseModel | None:
    path.write_bytes(content)
    return outcome(lambda: load_settings(model, {}, path), SettingsError)


@pytest.mark.parametrize(("suffix", "mark"), [(".toml", b" = "), (".yaml", b": ")])
def test_a_hostile_value_gives_settings_or_a_settings_error(
    directory: Path, suffix: str, mark: bytes
) -> None:
    names = (b"page_size", b"served_model_name", b"model_path", b"allowed_peers", b"mem_fraction_static")
    for name, value in itertools.product(names, PARTS):
        load(DecodeSettings, directory / f"value{suffix}", name + mark + value + b"\n")


@pytest.mark.parametrize(("suffix", "content"), [(".toml", TOML), (".yaml", YAML)])
@given(seed=seeds)
@fuzz_batches
def test_files_give_settings_or_a_settings_error(
    directory: Path, suffix: str, content: bytes, seed: int
) -> None:
    corpora = dict(zip(MODELS, _without_foreign_keys(content), strict=True))

    def check(text: bytes) -> None:
        for model in MODELS:
            settings = load(model, directory / f"settings{suffix}", text)
            if settings is not None:
                to_options(settings)

    batch(seed, lambda rng: damage(rng, list(corpora.values()), PARTS), check, count=BATCH // 10)


def _without_foreign_keys(content: bytes) -> list[bytes]:
    """One file a model, with the keys that it knows."""
    files = []
    for model in MODELS:
        known = {name.encode() for name in model.model_fields}
        lines = [line for line in content.splitlines(keepends=True) if line.strip()]
        files.append(b"".join(line for line in lines if _key(line) in known))
    return files


def _key(line: bytes) -> bytes:
    return line.split(b"=")[0].split(b":")[0].strip().replace(b"-", b"_")


@pytest.mark.parametrize(("suffix", "content"), [(".toml", TOML), (".yaml", YAML)])
def test_the_corpus_is_valid(directory: Path, suffix: str, content: bytes) -> None:
    for model, text in zip(MODELS, _without_foreign_keys(content), strict=True):
        assert load(model, directory / f"valid{suffix}", text) is not None


@given(seeds)
@fuzz_batches
def test_a_pairs_file_gives_settings_or_a_settings_error(directory: Path, seed: int) -> None:
    path = directory / "pair.toml"

    def check(text: bytes) -> None:
        path.write_bytes(text)
        outcome(lambda: pair.pair_settings({}, path), SettingsError)

    batch(seed, lambda rng: damage(rng, [PAIR], PARTS), check, count=BATCH // 10)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@fuzz
def test_values_of_any_type_give_settings_or_a_settings_error(
    model: type[BaseModel], data: st.DataObject
) -> None:
    values: dict[str, Any] = {"model_path": "/m", "prefill": ["http://a:1"], "decode": ["http://b:2"]}
    values = {name: value for name, value in values.items() if name in model.model_fields}
    names = st.sampled_from(sorted(model.model_fields))
    values |= data.draw(st.dictionaries(names, _values, min_size=1, max_size=3))
    settings = outcome(lambda: load_settings(model, values), SettingsError)
    if settings is not None:
        assert type(settings).model_validate(settings.model_dump()) == settings


_WORDS = [
    "prefill",
    "--page-size",
    "--page-size=1",
    "--allowed-peers",
    "10.0.0.0/8",
    "--prefill",
    "http://a:1",
]
_WORDS += ["--model-path", "--config", "/nowhere.toml", "--", "-", "-1", "--no-debug-checks"]
_words = st.text(max_size=8) | st.sampled_from(_WORDS)


@given(st.sampled_from(["prefill", "decode", "router", "pair"]), st.lists(_words, max_size=5))
@fuzz
def test_a_command_line_parses_or_ends_with_status_2(command: str, words: list[str]) -> None:
    status: object = 0
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.make_parser().parse_known_args([command, *words])
        except SystemExit as end:
            status = end.code
    assert status in (0, options.USAGE_ERROR)


# --- keys and peers -------------------------------------------------------------------------------------


def _outcome_of(load_keys: Callable[[], T]) -> tuple[T | None, str]:
    """The keys, or what the refusal says."""
    try:
        return load_keys(), ""
    except KeyFileError as error:
        return None, str(error)


_CONTROL_KEY = ControlKeys.generate().secret
_API_KEYS = b"# clients\ncorrect-horse-battery-staple\n\nanother-key-of-someone-else\n"


@given(seeds)
@fuzz_batches
def test_a_control_key_file_is_a_key_or_refused_without_being_shown(directory: Path, seed: int) -> None:
    path = directory / "control.key"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        keys, refusal = _outcome_of(lambda: ControlKeys.load(path))
        if keys is None:
            lines = content.decode("latin-1").splitlines()
            assert not any(len(line) > 8 and line in refusal for line in lines)
            return
        assert keys.secret.decode() not in repr(keys)
        assert keys.has_signed(keys.sign("a", b"b"), "a", b"b")
        assert not keys.has_signed(keys.sign("a", b"b"), "a", b"c")

    corpus, parts = [_CONTROL_KEY, _CONTROL_KEY + b"\n"], [b"\x00", b"\xff", b" " * 40]
    batch(seed, lambda rng: damage(rng, corpus, parts), check)


@given(seeds)
@fuzz_batches
def test_an_api_key_file_holds_keys_or_is_refused_without_being_shown(directory: Path, seed: int) -> None:
    path = directory / "hisparse_pd.api.keys"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        keys, refusal = _outcome_of(lambda: ApiKeys(path))
        if keys is None:
            assert "correct-horse" not in refusal
            assert "another-key" not in refusal
            return
        assert len(keys.first) >= MIN_KEY_CHARS
        assert keys.permits(keys.first.encode())
        lines = [line.strip().encode() for line in content.decode().splitlines()]
        for tried in (b"", b"#", b"# clients", b"correct-horse-battery-staple"):
            assert keys.permits(tried) == (tried in lines and tried[:1] not in (b"", b"#"))

    parts = [b"\x00", b"\xff", b"x" * 600, "\u2028".encode(), b"\r"]
    batch(seed, lambda rng: damage(rng, [_API_KEYS], parts), check)


@given(
    st.lists(
        st.text(max_size=20) | st.sampled_from(["10.0.0.0/24", "10.0.0.1/24", "::1", "fe80::1%e"]), max_size=3
    )
)
@fuzz
def test_a_list_of_peers_parses_or_is_a_value_error(entries: list[str]) -> None:
    peers = outcome(lambda: PeerList.parse(entries), ValueError)
    if peers:
        assert all(peers.allows(str(network.network_address)) for network in peers.networks)
        assert PeerList.parse(str(peers).split(", ")) == peers


_hosts = (
    st.text(max_size=30)
    | st.ip_addresses().map(str)
    | st.sampled_from(["::ffff:10.0.0.1", "[::1]", "fe80::1%eth0"])
)


@given(_hosts)
@fuzz
def test_any_text_is_a_peer_or_not(text: str) -> None:
    assert PeerList().allows(text)
    peers = PeerList.parse(["10.0.0.0/8"])
    assert peers.allows(text) == (peers.why_refused(text) is None)
    if is_host(text):
        assert not set(text) & set(" /?#@[]\\\n\r\t\0")
        json.dumps(text).encode("ascii")
