"""The service with a stand-in for the model: real router and fronts, and a script in the engines' place.

It runs in the project's environment, not in the clients'. ``--says``: a JSON file with the answers of a
conversation in their order. Each is a text, or a tool's name and its arguments, which are written as GLM
writes calls. The last number that the conversation gives for the amber falcon is added to a text, so a tool's
result must have contained it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.engine.messages import FromEngine, Generate, unpack_token_ids
from hisparse_pd.router.server import create_app
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.listening import Listener
from tests.unit.api import scripted_engine, support
from tests.unit.api.scripted_engine import ScriptedEngine, plays, stops_after
from tests.unit.api.tiny_tokenizer import make_tokenizer

CONTEXT_LENGTH = 1 << 20
FINDS = re.compile(r"amber falcon is (\w+)")
TITLE = '{"title": "Badges"}'
"""Answer to a request without tools, in which an agent asks for a title of the conversation."""

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}\x01{{ m.role }}\x02{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}\x01assistant\x02<think>{% endif %}"
)


def answer(says: list[Any], prompt: str) -> str:
    """Return what the model writes after ``prompt``."""
    if not prompt.startswith("[tools]"):
        return f"A title.</think>{TITLE}"
    step = says[min(prompt.count("\x01assistant\x02"), len(says)) - 1]
    if isinstance(step, str):
        return f"Now I know.</think>{step} {''.join(FINDS.findall(prompt)[-1:])}."
    name, arguments = step
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
    )
    return f"I look.</think>I call.\n<tool_call>{name}\n{pairs}</tool_call>"


def script(says: list[Any], prompt_of: Callable[[str], str]) -> scripted_engine.Script:
    """Return the script of the decode node's engine. A request's prompt is that of its group."""

    def run(generate: Generate) -> Iterable[FromEngine | float]:
        yield from stops_after(answer(says, prompt_of(generate.request_id)))(generate)

    return run


async def serve(model: str, says: list[Any], directory: Path) -> None:
    for name in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        setattr(scripted_engine, name, CONTEXT_LENGTH)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    support.CODEC = TextCodec(tokenizer, len(tokenizer), "glm_moe_dsa", grammar_checks=support.Unchecked())
    engines: list[ScriptedEngine] = []

    def prompt_of(request_id: str) -> str:
        (group,) = (
            group
            for group in engines[0].groups
            if any(sample.request_id == request_id for sample in group.samples)
        )
        return str(tokenizer.decode(unpack_token_ids(group.prompt).tolist()))

    options: dict[str, Any] = {"served_model_name": model}
    for name in ("prefill", "decode"):
        (directory / name).mkdir()
    async with (
        support.serving(plays(), directory / "prefill", role="prefill", **options) as prefill,
        support.serving(script(says, prompt_of), directory / "decode", **options) as decode,
    ):
        engines.append(decode.engine)
        listener = Listener("127.0.0.1", 0)
        settings = RouterSettings(
            prefill=((f"http://127.0.0.1:{prefill.port}", prefill.bootstrap_port),),
            decode=(f"http://127.0.0.1:{decode.port}",),
        )
        server = listener.server(create_app(settings), "on")
        print(f"hisparse-pd serves {model} at http://127.0.0.1:{listener.port}/v1", flush=True)
        with contextlib.closing(listener.socket):
            await server.serve(sockets=[listener.socket])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--says", type=Path, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    says = json.loads(arguments.says.read_text())
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.model, says, Path(directory)))


if __name__ == "__main__":
    main()
