"""Claude Code and Codex as npm has them: each reads files with its own tools and answers, over several turns.

Behind the real router and fronts a script stands in for the model (``stand_in``): reasoning, texts, calls.
The agents alone decide what they send, and the service must accept all of it.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import run
from tests.clients.conftest import REPO, running

MODULES = REPO / ".npm-clients" / "node_modules"
CLAUDE_CODE = MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
CODEX = MODULES / "@openai" / "codex" / "bin" / "codex.js"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node"),
    pytest.mark.skipif(
        not (CLAUDE_CODE.exists() and CODEX.exists()), reason="npm has not installed .npm-clients"
    ),
]

BADGE, LOCKER = "The badge of amber falcon is 58213.\n", "The locker of amber falcon is 77190.\n"
PATCH = "*** Begin Patch\n*** Add File: third.txt\n+The desk of amber falcon is 90134.\n*** End Patch"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_ANSWERED = re.compile(r'^hisparse_pd:router_requests_total\{.*status="(\d+)"\} (\S+)$', re.MULTILINE)

Says = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with files to read."""
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "first.txt").write_text(BADGE)
    (directory / "second.txt").write_text(LOCKER)
    return directory


@pytest.fixture
def saying(tmp_path: Path) -> Says:
    """A function that serves a model with scripted answers and yields the router's address."""

    @contextmanager
    def serve(*says: Any, model: str = "tiny") -> Iterator[str]:
        script = tmp_path / "says.json"
        script.write_text(json.dumps(says))
        command = ["tests.clients.stand_in", "--model", model, "--says", str(script)]
        with running(command, tmp_path / "stand_in.log") as (_, url):
            yield url

    return serve


def statuses(url: str) -> dict[str, float]:
    """Return the number of requests that the router answered, by status."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = _ANSWERED.findall(answer.read().decode())
    return {status: float(count) for status, count in found}


def claude_code(files: Path, url: str, *arguments: str, model: str = "tiny") -> str:
    """Run Claude Code; return the last text, which it prints."""
    environment = {
        "HOME": str(files.parent / "home"),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
    }
    options = ("--allowedTools", "Read,Bash", "-p")
    return run(files, "node", str(CLAUDE_CODE), *options, *arguments, **environment)


def codex(files: Path, url: str, *arguments: str, model: str = "tiny") -> str:
    """Run Codex; return its last text."""
    home, last = files.parent / "codex", files.parent / "last.txt"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "hisparse"\n'
        'model_reasoning_effort = "high"\nmodel_reasoning_summary = "detailed"\nmodel_verbosity = "high"\n'
        f'[model_providers.hisparse]\nname = "hisparse-pd"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\nenv_key = "HISPARSE_KEY"\n'
    )
    environment = {"HOME": str(home), "CODEX_HOME": str(home), "HISPARSE_KEY": "none"}
    options = (
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--output-last-message", str(last)),
    )
    run(files, "node", str(CODEX), *options, *arguments, **environment)
    return last.read_text()


# For a model with a name of Anthropic's it sends a budget for thinking.
@pytest.mark.parametrize("model", ["tiny", "claude-sonnet-4-5"])
def test_claude_code(files: Path, saying: Says, model: str) -> None:
    says = (
        ["Read", {"file_path": str(files / "first.txt")}],
        "The badge is",
        ["Bash", {"command": "cat second.txt", "description": "Shows the file"}],
        "The locker is",
        "As I said,",
    )
    with saying(*says, model=model) as url:
        assert claude_code(files, url, "Which badge?", model=model).strip() == "The badge is 58213."
        assert claude_code(files, url, "-c", "Which locker?", model=model).strip() == "The locker is 77190."
        assert claude_code(files, url, "-c", "Sure?", model=model).strip() == "As I said, 77190."
        assert statuses(url).keys() == {"200"}


def test_claude_code_goes_on_without_an_image(files: Path, saying: Says) -> None:
    """An image that it has just read is refused in words that it knows, so it asks again without it."""
    (files / "picture.png").write_bytes(base64.b64decode(PIXEL))
    says = (
        ["Read", {"file_path": str(files / "picture.png")}],
        "I see no picture",
        ["Read", {"file_path": str(files / "first.txt")}],
        "The badge is",
    )
    with saying(*says) as url:
        assert claude_code(files, url, "What is in the picture?").strip() == "I see no picture ."
        assert claude_code(files, url, "-c", "Which badge?").strip() == "The badge is 58213."
        assert statuses(url)["400"] == 1


def test_codex(files: Path, saying: Says) -> None:
    """Its tools have namespaces, and one is for a server to run. Its helper sends requests, too."""
    says = (
        ["exec_command", {"cmd": "cat first.txt"}],
        "The badge is",
        ["exec_command", {"cmd": "cat second.txt"}],
        "The locker is",
        ["multi_agent_v1.spawn_agent", {"message": "Read a file."}],
        "As I said,",  # also to a further request, sent once its helper is ready
    )
    with saying(*says) as url:
        assert codex(files, url, "Which badge?") == "The badge is 58213."
        assert codex(files, url, "resume", "--last", "Which locker?") == "The locker is 77190."
        assert codex(files, url, "resume", "--last", "Sure?") == "As I said, 77190."
        assert statuses(url).keys() <= {"200", "499"}  # it ends before its helper


def test_codex_edits_files(files: Path, saying: Says) -> None:
    """For a model with a name of OpenAI's it sends a tool that takes a text."""
    model = "gpt-5.5"
    says = (["apply_patch", {"input": PATCH}], ["exec_command", {"cmd": "cat third.txt"}], "The desk is")
    with saying(*says, model=model) as url:
        assert codex(files, url, "Write a file.", model=model) == "The desk is 90134."
        assert statuses(url).keys() == {"200"}
    assert (files / "third.txt").read_text() == "The desk of amber falcon is 90134.\n"
