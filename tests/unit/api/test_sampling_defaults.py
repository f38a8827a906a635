"""Sampling parameters that a request leaves out: the checkpoint's defaults, or OpenAI's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.api.schemas import parse_request
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY, MINIMAL, NATIVE, serving

pytestmark = pytest.mark.anyio

GLM = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2]}
OURS = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=40, min_p=0.05, repetition_penalty=1.1)


def write(directory: Path, content: object) -> Path:
    directory.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GLM, SamplingDefaults(0.6, 0.95, 0)),
        ({"temperature": 0, "top_k": 20}, SamplingDefaults(0.0, 1.0, 20)),
        ({"temperature": None, "top_p": None, "top_k": -1}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(0.7)),
        ({"repetition_penalty": 1.1, "min_p": 0.1}, SamplingDefaults(min_p=0.1, repetition_penalty=1.1)),
        ({"repetition_penalty": None, "min_p": 0, "frequency_penalty": 1}, SamplingDefaults()),
        ({}, SamplingDefaults()),
    ],
)
def test_what_generation_config_says(tmp_path: Path, content: object, expected: SamplingDefaults) -> None:
    assert SamplingDefaults.of_checkpoint(write(tmp_path, content)) == expected


def test_without_the_file_they_are_openais(tmp_path: Path) -> None:
    assert SamplingDefaults.of_checkpoint(tmp_path) == SamplingDefaults(1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ('{"temperature": NaN}', "cannot be read"),
        ("[]", "holds list, expected a JSON object"),
        ({"temperature": "hot"}, 'temperature: "hot" must be `float | null`; correct it'),
        ({"top_p": 0}, "top_p: 0 must be `float` > 0.0; correct it"),
    ],
)
def test_what_is_no_use_is_refused(tmp_path: Path, content: object, reason: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        SamplingDefaults.of_checkpoint(write(tmp_path, content))
    assert str(refused.value).startswith(f"{tmp_path}/generation_config.json: {reason}")
    assert "\n" not in str(refused.value)


def test_the_option_turns_them_off(tmp_path: Path) -> None:
    model_path = write(tmp_path, GLM)
    assert SamplingDefaults.of(DecodeSettings(model_path=model_path)) == SamplingDefaults(0.6, 0.95, 0)
    off = DecodeSettings(model_path=write(tmp_path, {"top_p": 7}), sampling_defaults="openai")
    assert SamplingDefaults.of(off) == SamplingDefaults()


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_request_that_does_not_say_gets_them(endpoint: Endpoint) -> None:
    def options(**said: Any) -> tuple[float, ...]:
        body = MINIMAL[endpoint] | ({"sampling_params": said} if endpoint is Endpoint.GENERATE else said)
        (options,) = parse_request(endpoint, json.dumps(body).encode(), "tiny", OURS).options
        found = options.sampling
        return found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty

    assert options() == (0.6, 0.95, 40, 0.05, 1.1)
    assert options(temperature=None) == (0.6, 0.95, 40, 0.05, 1.1)
    assert options(temperature=0) == (0.0, 0.95, 40, 0.05, 1.1)
    assert options(top_p=1) == (0.6, 1.0, 40, 0.05, 1.1)
    assert options(top_k=-1) == options(top_k=0) == (0.6, 0.95, 0, 0.05, 1.1)
    assert options(min_p=0, repetition_penalty=1) == (0.6, 0.95, 40, 0.0, 1.0)


async def test_a_node_hands_them_to_its_engine(tmp_path: Path) -> None:
    write(tmp_path / "model", asdict(OURS))
    async with serving(say("abcde"), tmp_path) as node:
        for path, body in (("/v1/completions", BODY), ("/generate", NATIVE)):
            assert (await node.post(path, **body)).status_code == 200
        assert (await node.client.get("/model_info")).json()["default_sampling_params"] == asdict(OURS)
        for generate in node.engine.generates:
            sampling = generate.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 40)
            assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)


def test_what_differs_from_openais_is_told() -> None:
    assert str(SamplingDefaults()) == ""
    assert str(OURS) == "temperature 0.6, top_p 0.95, top_k 40, min_p 0.05, repetition_penalty 1.1"
