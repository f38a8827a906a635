"""The command line: help, errors, keys, and the processes of ``pair``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.ports import free_port
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.commands import cli
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.protocol.channels import ControlKeys
from hisparse_pd.router import supervisor
from hisparse_pd.router.supervisor import Child, Health, Supervisor, probe
from tests.preloaded import Preloaded
from tests.waiting import WAIT_SECS, wait_until

REPO = Path(__file__).resolve().parents[2]
SERVICE = """
import http.server, sys, signal, time
port, behaviour = int(sys.argv[1]), sys.argv[2]
if behaviour == "dies":
    sys.exit(7)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if behaviour == "sick" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


@pytest.fixture
def run_cli(preloaded: Preloaded, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a command in a fork that has its imports; return its exit status and what it wrote."""

    def run(*arguments: str) -> tuple[int, str]:
        path = tmp_path / "output"
        with path.open("wb") as output:
            command = preloaded.start("hisparse_pd", arguments, os.environ, output)
        return command.wait(120), path.read_text()

    return run


def exits(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


# --- help and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("prefill", PrefillSettings),
        ("decode", DecodeSettings),
        ("router", RouterSettings),
        ("doctor", DoctorSettings),
    ],
)
def test_help_explains_every_option(
    capsys: pytest.CaptureFixture[str], command: str, model: type[PrefillSettings]
) -> None:
    code, out, _ = exits(capsys, command, "--help")
    text = " ".join(out.split())
    assert code == 0
    for name, field in model.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(str(field.description).split()) in text
        if not field.is_required() and field.default not in (None, "", ()):
            assert f"default: {field.default}" in text


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(capsys, "--version") == (0, f"hisparse-pd {metadata.version('hisparse-pd')}\n", "")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hisparse_pd.commands.cli", ("torch", "transformers", "zmq", "uvicorn", "httpx")),
        ("hisparse_pd.commands.doctor.command", ("torch", "transformers", "uvicorn", "httpx")),
    ],
    ids=["help", "doctor"],
)
def test_what_is_slow_to_import_is_imported_late(module: str, heavy: tuple[str, ...]) -> None:
    """Help is fast, and the doctor can report a torch that is broken."""
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prefill", "--page-sise", "3"], ["--page-sise", "did you mean --page-size"]),
        (
            ["prefill", "--page-size", "0"],
            ["--page-size: '0': expected an integer (at least 1, at most 65536)"],
        ),
        (
            ["decode", "--model-path", "m", "--hisparse", "alwys"],
            ["--hisparse", "never", "did you mean always"],
        ),
        (["decode"], ["--model-path is required"]),
        (["router", "--decode", "http://a:1"], ["--prefill is required"]),
        (["router", "--decode", "http://a:1", "--prefill", "http://b:1", "x"], ["--prefill", "'x'"]),
        (["pair", "--page-size", "x", "--model-path", "m"], ["--page-size"]),
        (["pair", "--config", "gone.toml"], ["--config gone.toml: No such file or directory"]),
        (["prefil"], ["prefill", "decode", "router", "pair", "keygen"]),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_is_allowed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    code, _, err = exits(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in err


def test_a_bad_node_url_stops_the_router_before_it_serves(run_cli: Callable[..., tuple[int, str]]) -> None:
    nodes = ("--prefill", "localhost:1", "--decode", "http://127.0.0.1:2")
    status, output = run_cli("router", *nodes, "--port", "0")
    assert status == 2
    assert "prefill node 'localhost:1'" in output


NO_NODES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")


def test_a_taken_port_ends_the_router_with_an_error(run_cli: Callable[..., tuple[int, str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, output = run_cli("router", *NO_NODES, "--port", str(port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "Traceback" not in output


def test_sigterm_stops_the_router_with_status_0() -> None:
    """It says where it serves before it has asked its nodes, and can be stopped from then on."""
    router = subprocess.Popen(
        [sys.executable, "-m", "hisparse_pd", "router", *NO_NODES, "--port", "0"],
        cwd=REPO,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert router.stderr is not None
    line = next(line for line in router.stderr if "serving on" in line)
    port = int(line.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    router.terminate()
    _, log = router.communicate(timeout=60)
    assert router.returncode == 0
    assert "Traceback" not in log


# --- keygen ------------------------------------------------------------------------------------------------


def test_keygen_writes_a_key_that_loads_and_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "control.key"
    assert cli.main(["keygen", str(path)]) == 0
    assert len(ControlKeys.load(path).secret) == 40
    assert path.stat().st_mode & 0o777 == 0o600


def test_keygen_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "control.key"
    path.write_text("precious")
    code, _, err = exits(capsys, "keygen", str(path))
    assert code == 2
    assert f"{path} exists" in err
    assert path.read_text() == "precious"


def test_keygen_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "control.key"
    code, _, err = exits(capsys, "keygen", str(path))
    assert (code, err) == (2, f"hisparse-pd keygen: error: {path}: No such file or directory\n")


# --- the supervisor of a pair ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the signal handlers, which a supervisor replaces for good."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def service(tmp_path: Path) -> Callable[[str, str], Child]:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)

    def child(name: str, behaviour: str = "healthy") -> Child:
        port = free_port()
        command = [sys.executable, "-S", str(script), str(port), behaviour]
        return Child(name, command, f"http://127.0.0.1:{port}/health")

    return child


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(parent: Supervisor) -> list[int]:
    return [process.pid for process in parent.processes.values()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_children_and_exits_with_0(
    service: Callable[..., Child], number: signal.Signals
) -> None:
    parent = Supervisor([service("prefill"), service("decode"), service("router")], WAIT_SECS)
    healthy: list[bool] = []

    def on_healthy() -> None:
        healthy.append(all(is_running(pid) for pid in pids(parent)))
        os.kill(os.getpid(), number)

    assert parent.run(on_healthy) == 0
    assert healthy == [True]
    assert len(pids(parent)) == 3
    assert not any(is_running(pid) for pid in pids(parent))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pair --model-path m", "hisparse-pd serves m at http://127.0.0.1:"),
        ("doctor", "check "),
    ],
)
def test_a_command_goes_on_whatever_becomes_of_its_output(tmp_path: Path, command: str, words: str) -> None:
    """A pair runs without its services, which are healthy at once; the doctor only prints its report."""
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\nfrom hisparse_pd.commands import cli\nfrom hisparse_pd.router import supervisor\n"
        "supervisor.Supervisor.run = lambda self, on_healthy: on_healthy() or 0\n"
        "if sys.argv[1] == 'doctor':\n"
        "    from hisparse_pd.commands.doctor import command\n"
        "    command.examine = lambda *_: command.Report((), None)\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(script), *command.split()],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert f"No space left on device; {words}" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (0, False, False)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("dies", "the decode service exited with 7"),
        ("sick", "not healthy, and no progress for 100 s: decode;"),
    ],
)
def test_a_child_that_does_not_become_healthy_is_named(
    service: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    behaviour: str,
    words: str,
) -> None:
    """The time for their start is up once the other child is healthy."""
    prefill, decode = service("prefill"), service("decode", behaviour)
    now = 0.0

    def ask(client: httpx.Client, url: str) -> Health:
        nonlocal now
        health = probe(client, url)
        if behaviour == "sick" and url == prefill.health_url and health.is_healthy:
            now = 101.0
        return health

    monkeypatch.setattr(supervisor, "probe", ask)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    parent = Supervisor([prefill, decode], 100.0)
    assert parent.run(lambda: pytest.fail("it never was healthy")) == 1
    assert words in caplog.text
    assert not any(is_running(pid) for pid in pids(parent))


def test_a_child_that_dies_later_takes_the_others_along(
    service: Callable[..., Child], caplog: pytest.LogCaptureFixture
) -> None:
    parent = Supervisor([service("prefill"), service("decode")], WAIT_SECS)
    assert parent.run(lambda: parent.processes["prefill"].kill()) == 1
    assert "the prefill service was killed by SIGKILL" in caplog.text
    assert not any(is_running(pid) for pid in pids(parent))


@pytest.mark.parametrize("gets_further", [True, False])
def test_a_child_that_loads_has_all_the_time_that_it_gets_further_in(
    service: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gets_further: bool,
) -> None:
    """The child gives ten answers, 200 s apart; the supervisor's limit is 300 s."""
    now = 0.0

    def answer(client: object, url: str) -> Health:
        nonlocal now
        now += 200.0
        if now > 2000.0:
            return Health(is_healthy=True)
        return Health(loading={"stage": "weights", "num_done": int(now) if gets_further else 1})

    monkeypatch.setattr(supervisor, "probe", answer)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_SECS", 0.01)
    parent = Supervisor([service("decode", "sick")], 300.0)
    status = parent.run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (status, now) == ((0, 2200.0) if gets_further else (1, 600.0))
    assert ("no progress for 300 s: decode" in caplog.text) is not gets_further


def test_a_probe_takes_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "/ok": httpx.Response(200),
        "/loading": httpx.Response(503, json={"status": "loading", "loading": {"num_done": 7}}),
        "/text": httpx.Response(503, text="not JSON"),
        "/list": httpx.Response(503, json=[]),
    }
    with httpx.Client(transport=httpx.MockTransport(lambda request: answers[request.url.path])) as client:
        found = {path: probe(client, f"http://node{path}") for path in answers}
    assert found == {
        "/ok": Health(is_healthy=True),
        "/loading": Health(loading={"num_done": 7}),
        "/text": Health(),
        "/list": Health(),
    }


def test_a_child_that_ignores_sigterm_is_killed(
    service: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_SECS", 0.3)
    parent = Supervisor([service("decode", "stubborn")], WAIT_SECS)
    assert parent.run(lambda: parent.stopping.set()) == 1
    assert not any(is_running(pid) for pid in pids(parent))


def test_children_end_when_their_parent_is_killed(service: Callable[..., Child], tmp_path: Path) -> None:
    child = service("decode")
    pid_file = tmp_path / "pid"
    code = (
        "from pathlib import Path; from hisparse_pd.router.supervisor import Child, Supervisor; "
        f"s = Supervisor([Child('decode', {child.command!r}, {child.health_url!r})], {WAIT_SECS}); "
        f"s.run(lambda: Path({str(pid_file)!r}).write_text(str(s.processes['decode'].pid)))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPO)
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(pid))
