"""The header in which a decode node names a prompt's pages for a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, block_hash, page_keys
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.serving.http.page_names import PageNames, decode_names
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import ROOM, serving

pytestmark = pytest.mark.anyio

PAGE = 4
IDS = [100 + number % 20 for number in range(30)]
BODY: dict[str, Any] = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 3}, **ROOM}
ASKS = {"x-hisparse-pd-pages": "1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_shared_pages_have_names_if_a_router_asks(tmp_path: Path, stream: bool) -> None:
    async with serving(say("abc"), tmp_path, page_size=PAGE) as node:
        body = {**BODY, "stream": stream}
        plain = await node.client.post("/generate", json=body)
        assert "x-hisparse-pd-pages" not in plain.headers
        answer = await node.client.post("/generate", json=body, headers=ASKS)
        hashes = list(map(block_hash, page_keys(NO_ISOLATION, pack_token_ids(IDS), PAGE)))
        # Position 28 is the first whose KV is that of steps.
        expected = PageNames(PAGE, 30, tuple((count, hashes[count - 1]) for count in (1, 2, 4, 7)))
        assert decode_names(answer.headers["x-hisparse-pd-pages"].encode()) == expected


@pytest.mark.parametrize("change", [{"cache_salt": "secret"}, {"input_ids": IDS[:4]}])
async def test_what_is_not_shared_has_no_name(tmp_path: Path, change: dict[str, object]) -> None:
    async with serving(say("abc"), tmp_path, page_size=PAGE) as node:
        answer = await node.client.post("/generate", json={**BODY, **change}, headers=ASKS)
        assert answer.status_code == 200
        assert "x-hisparse-pd-pages" not in answer.headers
