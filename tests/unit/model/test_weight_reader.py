"""Reading a checkpoint's files: several threads, pieces, progress, and what a file does not give."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model import weight_reader
from hisparse_pd.core.model.stored_weights import weight_files
from hisparse_pd.core.model.weight_reader import Placement, WeightFiles, describe, read_weights
from hisparse_pd.kernels.block_fp8 import dequantize, quantize
from tests.waiting import WAIT_SECS

CPU = torch.device("cpu")
PIECE_BYTES = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    """Tensors in two files: with several pieces, one piece, rows longer than a piece, no rows, no
    dimension."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "many_pieces": torch.randn(1000, 40, generator=generator),
        "vector": torch.randn(5000, generator=generator),
        "long_rows": torch.randn(3, 5000, generator=generator),
        "cube": torch.randn(7, 30, 40, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 8),
        "matrix": torch.randn(300, 200, generator=generator),
    }
    tensors["fp8"], tensors["fp8_scale_inv"] = quantize(tensors["matrix"])
    names = list(tensors)
    for number, part in enumerate((names[:4], names[4:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"{number}.safetensors")
    return tensors


def files_of(directory: Path) -> WeightFiles:
    return WeightFiles(weight_files(directory))


def placements(files: WeightFiles, targets: dict[str, Tensor]) -> list[Placement]:
    found = []
    for name, target in targets.items():
        stored = files.get(name)
        assert stored is not None
        found.append(Placement(stored, target))
    return found


def fill(directory: Path, targets: dict[str, Tensor], **options: Any) -> None:
    with files_of(directory) as files:
        read_weights(placements(files, targets), CPU, **options)


@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_targets_get_what_the_files_hold(
    tensors: dict[str, Tensor], tmp_path: Path, num_threads: int, dtype: torch.dtype | None
) -> None:
    expected = {name: value.to(dtype or value.dtype) for name, value in tensors.items()}
    targets = {name: torch.full_like(value, 7) for name, value in expected.items()}
    fill(tmp_path, targets, num_threads=num_threads)
    for name, target in targets.items():
        found, wanted = (tensor.flatten().view(torch.uint8) for tensor in (target, expected[name]))
        assert torch.equal(found, wanted), name


def test_a_target_may_be_spread_in_memory(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    held = torch.zeros(1000, 80)
    fill(tmp_path, {"many_pieces": held[:, 20:60]})
    assert torch.equal(held[:, 20:60], tensors["many_pieces"])
    assert not held[:, :20].any()
    assert not held[:, 60:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_becomes_what_its_scales_make_of_it(
    tensors: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    """Piece by piece: a piece of a matrix is of whole rows of blocks."""
    target = torch.empty(300, 200, dtype=dtype)
    with files_of(tmp_path) as files:
        stored, scales = files.get("fp8"), files.get("fp8_scale_inv")
        assert stored is not None
        read_weights([Placement(stored, target, scales)], CPU)
    assert torch.equal(target, dequantize(tensors["fp8"], tensors["fp8_scale_inv"], dtype))


def test_several_threads_read_at_once(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first four reads end only together."""
    together = threading.Barrier(4, timeout=WAIT_SECS)
    monkeypatch.setattr(os, "preadv", _first(4, lambda: together.wait()))
    target = torch.empty(1000, 40)
    fill(tmp_path, {"many_pieces": target}, num_threads=4)
    assert torch.equal(target, tensors["many_pieces"])


def _first(count: int, also: Callable[[], object]) -> Callable[[int, Sequence[Any], int], int]:
    preadv, lock, num_calls = os.preadv, threading.Lock(), 0

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal num_calls
        with lock:
            num_calls += 1
            is_one = num_calls <= count
        if is_one:
            also()
        return preadv(descriptor, buffers, offset)

    return read


def test_a_buffer_holds_one_piece(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """It holds one row where rows are longer than a piece, and there is none where nothing is converted."""
    with files_of(tmp_path) as files:

        def buffer_bytes(name: str, dtype: torch.dtype) -> int:
            found = placements(files, {name: tensors[name].to(dtype)})
            return weight_reader.Reading(found, CPU, pinned=False).buffer_bytes

        assert buffer_bytes("many_pieces", torch.bfloat16) <= PIECE_BYTES
        assert buffer_bytes("long_rows", torch.bfloat16) == 5000 * 4
        assert buffer_bytes("many_pieces", torch.float32) == 0


def test_short_reads_are_gone_on_with(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:999]], offset))
    target = torch.empty(1000, 40)
    fill(tmp_path, {"many_pieces": target})
    assert torch.equal(target, tensors["many_pieces"])


def test_progress_is_told_by_the_caller_and_ends_at_all_bytes(
    tensors: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, int]] = []
    tellers: set[threading.Thread] = set()

    def on_progress(done: int, total: int) -> None:
        told.append((done, total))
        tellers.add(threading.current_thread())

    caplog.set_level("INFO")
    fill(
        tmp_path, {name: torch.empty_like(value) for name, value in tensors.items()}, on_progress=on_progress
    )
    total = sum(value.nbytes for value in tensors.values())
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert tellers == {threading.current_thread()}
    (line,) = caplog.messages
    assert line.startswith("read 0.0 of 0.0 GB of weights in 0 s, ")


def test_a_line_of_progress_has_the_time_that_is_left() -> None:
    for gb, total_gb, secs, line in (
        (0, 690, 3.0, "read 0.0 of 690.0 GB of weights in 3 s, 0.00 GB/s, nothing yet"),
        (138, 690, 20.0, "read 138.0 of 690.0 GB of weights in 20 s, 6.90 GB/s, 80 s left"),
        (69, 69, 10.0, "read 69.0 of 69.0 GB of weights in 10 s, 6.90 GB/s"),
    ):
        assert describe(gb * 10**9, total_gb * 10**9, secs) == line


# --- what a file does not give ---------------------------------------------------------------------------


def test_a_file_that_was_cut_off_is_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"1\.safetensors: the file cannot be read: .*[Ii]ncomplete"):
        files_of(tmp_path)
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"1\.safetensors: the file cannot be read: "):
        files_of(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    with files_of(tmp_path) as files:
        os.truncate(tmp_path / "0.safetensors", 30_000)
        found = placements(files, {"many_pieces": torch.empty(1000, 40)})
        with pytest.raises(CheckpointError, match=r"0\.safetensors: .* within many_pieces"):
            read_weights(found, CPU)


def test_an_error_in_a_thread_names_file_and_tensor_and_ends_all(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", _first(1, fail))
    with pytest.raises(CheckpointError, match=r"0\.safetensors: many_pieces cannot be read: .*Input/output"):
        fill(tmp_path, {"many_pieces": torch.empty(1000, 40)}, num_threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_a_dtype_of_no_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"ids": torch.arange(4)}, tmp_path / "0.safetensors")
    with pytest.raises(CheckpointError, match=r"ids is in I64; supported are F64, F32"):
        fill(tmp_path, {"ids": torch.empty(4)})
