"""A node's own processes with engines that speak slowly; what they do not need they do not import.

usage: python -m tests.unit.api.slow_node prefill|decode MODEL_PATH PORT NUM_FRONTS DRAIN_TIMEOUT_SECS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.engine.messages import FromEngine, Generate


def run_engine(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    """Send the rest of each answer once there is a file ``go_on`` beside the model."""
    from tests.unit.api.scripted_engine import ScriptedEngine, say, serve_script

    go_on = settings.model_path.parent / "go_on"

    def script(sample: Generate) -> Iterator[FromEngine | float]:
        first, *others = say("abcdefgh"[: sample.sampling.max_new_tokens])(sample)
        yield first
        while others and not go_on.exists():
            yield 0.01
        yield from others

    serve_script(endpoints, ScriptedEngine(endpoints, script))


def run_prefill_engine(settings: PrefillSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    """Keep a room in hand until there is a file ``go_on`` beside the model."""
    from hisparse_pd.engine.sockets import EngineSocket
    from tests.unit.api.scripted_engine import ScriptedEngine, serve_script

    go_on = settings.model_path.parent / "go_on"

    class Engine(ScriptedEngine):
        def turn(self, socket: EngineSocket) -> bool:
            self.num_running, self.num_waiting = int(not go_on.exists()), 0
            self.step += 1
            return super().turn(socket)

    serve_script(endpoints, Engine(endpoints, lambda sample: ()))


def run_prefill(model_path: Path, port: int, num_fronts: int, drain_timeout_secs: float) -> int:
    from hisparse_pd.base.ports import free_port
    from hisparse_pd.prefill_node.server import apps
    from hisparse_pd.serving.api.node import run_front
    from hisparse_pd.serving.http.engine_link import rooms_at_work

    settings = PrefillSettings(
        model_path=model_path,
        port=port,
        bootstrap_port=free_port(),
        dp_size=num_fronts,
        drain_timeout_secs=drain_timeout_secs,
    )
    return run_front(
        settings,
        role="prefill",
        engine=run_prefill_engine,
        num_at_work=rooms_at_work,
        ports=(port, settings.bootstrap_port),
        apps=apps,
    )


def run_decode(model_path: Path, port: int, num_fronts: int, drain_timeout_secs: float) -> int:
    from hisparse_pd.decode_node.server import apps
    from hisparse_pd.serving.api.node import run_front
    from hisparse_pd.serving.http.rank_choice import least_loaded

    settings = DecodeSettings(
        model_path=model_path,
        port=port,
        served_model_name="tiny",
        dp_size=num_fronts,
        api_server_count=num_fronts,
        max_running_requests=4,
        max_queued_requests=2,
        drain_timeout_secs=drain_timeout_secs,
    )
    return run_front(
        settings,
        role="decode",
        engine=run_engine,
        choose_rank=least_loaded,
        ports=(port,),
        apps=apps,
    )


if __name__ == "__main__":
    role, path, *numbers = sys.argv[1:]
    run = run_prefill if role == "prefill" else run_decode
    sys.exit(run(Path(path), int(numbers[0]), int(numbers[1]), float(numbers[2])))
