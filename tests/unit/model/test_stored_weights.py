"""The file that each tensor of a checkpoint is read from, and what two nodes compare of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model import stored_weights
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.core.model.stored_weights import INDEX_NAME, fingerprint_of, weight_files
from hisparse_pd.core.model.weight_reader import Placement, WeightFiles, read_weights
from tests.fp8_checkpoints import in_two_files
from tests.unit.model.loading import load_ours
from tools.checkpoints.make_tiny import write_checkpoint
from tools.checkpoints.quantize_fp8 import quantize_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(directory: Path, file_name: str, **values: float) -> None:
    """A file of vectors, each full of one value."""
    from safetensors.torch import save_file

    save_file({name: torch.full((4,), value) for name, value in values.items()}, directory / file_name)


def write_index(directory: Path, **file_of: object) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def read_all(directory: Path) -> dict[str, float]:
    """The first element of each tensor that the reader finds."""
    files = weight_files(directory)
    targets: dict[str, Tensor] = {name: torch.empty(4) for file in files for name in file.tensors}
    with WeightFiles(files) as opened:
        placements = []
        for name, target in targets.items():
            stored = opened.get(name)
            assert stored is not None
            placements.append(Placement(stored, target))
        read_weights(placements, torch.device("cpu"), num_threads=2)
    return {name: target[0].item() for name, target in targets.items()}


def fingerprint(directory: Path) -> str:
    return fingerprint_of({}, weight_files(directory))


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Two shards and their index."""
    write(tmp_path, FIRST, a=1.0, b=2.0)
    write(tmp_path, SECOND, c=3.0)
    write_index(tmp_path, a=FIRST, b=FIRST, c=SECOND)
    return tmp_path


# --- the index decides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", ["model.safetensors", "a-backup.safetensors", "zz.safetensors"])
def test_a_tensor_is_read_from_the_file_that_the_index_says(split: Path, stale: str) -> None:
    """Stale files count for nothing, whether their names sort before or behind the shards'."""
    before = fingerprint(split)
    write(split, stale, a=-1.0, b=-2.0, c=-3.0)
    assert read_all(split) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert fingerprint(split) == before
    write(split, stale, a=-7.0, c=-3.0)
    assert fingerprint(split) == before


def test_the_index_decides_between_two_files_that_it_names(split: Path) -> None:
    write(split, SECOND, a=-1.0, c=3.0)
    assert read_all(split) == {"a": 1.0, "b": 2.0, "c": 3.0}
    before = fingerprint(split)
    write_index(split, a=SECOND, b=FIRST, c=SECOND)
    assert read_all(split) == {"a": -1.0, "b": 2.0, "c": 3.0}
    assert fingerprint(split) != before


def test_files_with_new_names_are_read_beside_the_index(split: Path) -> None:
    before = fingerprint(split)
    write(split, "mtp.safetensors", a=-1.0, draft=4.0)
    assert read_all(split) == {"a": 1.0, "b": 2.0, "c": 3.0, "draft": 4.0}
    with_draft = fingerprint(split)
    assert with_draft != before
    write(split, "mtp.safetensors", a=-5.0, draft=4.0)
    assert fingerprint(split) == with_draft
    write(split, "other.safetensors", draft=4.0)
    with pytest.raises(
        CheckpointError, match=r"'draft' is in mtp\.safetensors and in other\.safetensors, .*move the file"
    ):
        weight_files(split)


def test_a_stale_file_changes_no_weight_of_a_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "split", "v32")
    shutil.copytree(tmp_path / "split", tmp_path / "stale")
    in_two_files(tmp_path / "split")
    spec = load_spec(tmp_path / "split")
    (expected,) = load_ours(tmp_path / "split", spec, 1)
    stale = bytearray((tmp_path / "stale" / "model.safetensors").read_bytes())
    stale[len(stale) // 2 :] = bytes(len(stale) - len(stale) // 2)
    (tmp_path / "split" / "model.safetensors").write_bytes(stale)
    assert load_spec(tmp_path / "split") == spec
    (found,) = load_ours(tmp_path / "split", spec, 1)
    weights = found.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.state_dict().items())


def test_the_quantizer_takes_what_a_node_would_read(split: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (split / "config.json").write_text("{}")
    write(split, "model.safetensors", a=-1.0, draft=4.0)
    quantize_checkpoint(split, tmp_path / "out")
    found = {
        (file.name, name): tensor[0].item()
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert found == {
        (FIRST, "a"): 1.0,
        (FIRST, "b"): 2.0,
        (SECOND, "c"): 3.0,
        ("model.safetensors", "draft"): 4.0,
    }


# --- without an index ------------------------------------------------------------------------------------


def test_without_an_index_a_name_may_be_in_one_file_only(split: Path) -> None:
    (split / INDEX_NAME).unlink()
    assert read_all(split) == {"a": 1.0, "b": 2.0, "c": 3.0}
    write(split, "model.safetensors", b=2.0)
    with pytest.raises(
        CheckpointError,
        match=rf"'b' is in {FIRST} and in model\.safetensors, and no {INDEX_NAME} says which counts; move",
    ):
        weight_files(split)


# --- an index that cannot be followed --------------------------------------------------------------------


def test_a_file_that_the_index_names_is_there_and_has_the_tensor(split: Path) -> None:
    write_index(split, a=FIRST, b=SECOND, c=SECOND)
    with pytest.raises(CheckpointError, match=rf"{SECOND}: there is no 'b' in it, where {INDEX_NAME} says"):
        weight_files(split)
    write_index(split, a=FIRST, b=FIRST, c="model-00003-of-00003.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 weight files .* missing, first 'model-00003-of-00003\.safetensors', .*'c'"
    ):
        weight_files(split)


@pytest.mark.parametrize(
    "file_name",
    [
        "../model.safetensors",
        "/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "a.bin",
        7,
        None,
        [FIRST],
    ],
)
def test_the_index_names_files_of_its_own_directory(split: Path, file_name: object) -> None:
    write(split.parent, "model.safetensors", a=9.0)
    write_index(split, a=file_name)
    with pytest.raises(CheckpointError, match=rf"weight_map has {re.escape(repr(file_name))} for 'a'; exp"):
        weight_files(split)


def test_an_index_that_is_none_is_refused(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_file = split / INDEX_NAME
    for content, said in (
        (b"no json", "the index cannot be read"),
        (b"\xff\xfe\x00", "the index cannot be read"),
        (b"[" * 100_000, "the index cannot be read: .*recursion"),
        (b"[]", "expected an object with a weight_map"),
        (b"{}", "expected an object with a weight_map"),
        (b'{"weight_map": ["a"]}', "expected an object with a weight_map"),
        (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', ".*'a' is in one object twice"),
    ):
        index_file.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"index\.json: {said}"):
            weight_files(split)
    monkeypatch.setattr(stored_weights, "MAX_JSON_BYTES", 1000)
    index_file.write_bytes(b" " * 1001)
    with pytest.raises(CheckpointError, match="the index has 1001 bytes; 1000 are the most"):
        weight_files(split)
    index_file.unlink()
    index_file.symlink_to("blob")
    with pytest.raises(CheckpointError, match="the index cannot be read"):
        weight_files(split)


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4]}}',
        b'{"a": {"dtype": 3, "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}}',
    ],
)
def test_a_file_whose_header_is_none_is_named(split: Path, header: bytes) -> None:
    (split / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=rf"{SECOND}: the file cannot be read: "):
        weight_files(split)


# --- the fingerprint -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda path: write(path, FIRST, a=1.0, b=2.5),
        lambda path: write(path, FIRST, a=1.5, b=2.0),
        lambda path: write(path, SECOND, c=3.5),
        lambda path: write(path, SECOND, c=3.0, d=3.0),
    ],
)
def test_the_fingerprint_follows_what_is_read(split: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(split)
    change(split)
    assert fingerprint(split) != before


def test_the_fingerprint_of_a_large_file_has_samples_from_all_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has an ignored tensor amid those that are read."""
    from safetensors.torch import save_file

    monkeypatch.setattr(stored_weights, "SAMPLE_BYTES", 256)
    tensors = {name: torch.zeros(20_000) for name in "abcde"}
    file = tmp_path / FIRST
    save_file(tensors, file)
    write(tmp_path, SECOND, c=3.0)
    write_index(tmp_path, **dict.fromkeys("abde", FIRST), c=SECOND)
    before = fingerprint(tmp_path)
    for name, tensor in tensors.items():
        for part in (slice(0, 5_000), slice(8_000, 12_000), slice(15_000, 20_000)):
            tensor[part] = 1
            save_file(tensors, file)
            assert (fingerprint(tmp_path) != before) == (name != "c"), (name, part)
            tensor[part] = 0
    for name, at in (("a", 0), ("e", 19_999)):
        tensors[name][at] = 1
        save_file(tensors, file)
        assert fingerprint(tmp_path) != before
        tensors[name][at] = 0
