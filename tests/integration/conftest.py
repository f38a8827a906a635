"""Small pairs for all tests that do not break them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.harness import DEVICE, Deployment, Service, deployment
from tests.preloaded import Preloaded


@pytest.fixture(autouse=True, scope="package")
def services_are_forked(preloaded: Preloaded) -> Iterator[None]:
    """Fork services from a process that has imported what they import, unless there is a GPU."""
    if DEVICE != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "preloaded", preloaded)
        yield


@pytest.fixture(scope="package")  # later it would take time and memory from other tests
def pair(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A prefill node, a decode node and our router. Tests leave it as they found it.

    Its checkpoint has no chat template, like DeepSeek-V3.2 as it is published, so chats may have tools.
    """
    directory = tmp_path_factory.mktemp("pair")
    checkpoint = shutil.copytree(tiny_checkpoint("v32"), directory / "model")
    (checkpoint / "chat_template.jinja").unlink()
    with deployment(
        checkpoint,
        directory,
        prefill_options=["--served-model-name", "tiny"],
        decode_options=["--served-model-name", "tiny", "--device-buffer-size", "128"],
    ) as started:
        yield started


@pytest.fixture(scope="package")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A pair of the trained model.

    A long request's hot buffer has room for one draft, and the device pool leaves auto a choice.
    """
    from tools.bench.documents import RETRIEVAL_MODEL  # and torch, which pytest's controller does not need

    with deployment(
        RETRIEVAL_MODEL,
        tmp_path_factory.mktemp("trained"),
        prefill_options=["--kv-pool-tokens", "65536", "--chunked-prefill-size", "512"],
        decode_options=[
            *("--device-buffer-size", "132", "--host-pool-tokens", "65536"),
            *("--device-pool-tokens", "16384", "--speculative-num-steps", "3"),
        ],
    ) as started:
        yield started
