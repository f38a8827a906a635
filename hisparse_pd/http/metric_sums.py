"""Metrics of several processes as those of one: each gives its own, and who is asked adds them up."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def pack(registry: CollectorRegistry) -> bytes:
    """The present numbers of one process, for another one of the same program."""
    return pickle.dumps(list(registry.collect()))


def render(of_all: Collector, packed: Sequence[bytes]) -> bytes:
    """Prometheus text: ``of_all``, which is known here, and the sums of what is ``packed``."""
    registry = CollectorRegistry()
    registry.register(of_all)
    registry.register(_Sums(packed))
    return generate_latest(registry)


class _Sums(Collector):
    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering is not to collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The families of all processes; a sample is their sum, ``_created`` the oldest one's."""
        families: dict[str, Metric] = {}
        values: defaultdict[str, defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = (
            defaultdict(lambda: defaultdict(list))
        )
        for of_one in self._packed:
            for family in pickle.loads(of_one):
                families.setdefault(family.name, family)
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    values[family.name][key].append(sample.value)
        for name, family in families.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample_name, labels), of_all in values[name].items():
                of_created = sample_name.endswith("_created")
                metric.add_sample(sample_name, dict(labels), min(of_all) if of_created else sum(of_all))
            yield metric
