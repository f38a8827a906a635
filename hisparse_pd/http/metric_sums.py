"""Metrics of several processes as those of one: each gives its own, and who is asked adds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.msgpack import Encoder
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.decoding import TypedDecoder


class _Sample(Struct, frozen=True, array_like=True):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class _Family(Struct, frozen=True, array_like=True):
    name: str
    text: str
    kind: str
    samples: tuple[_Sample, ...]


_encoder = Encoder()
_decoder: TypedDecoder[tuple[_Family, ...]] = TypedDecoder(tuple[_Family, ...])


def pack(registry: CollectorRegistry) -> bytes:
    """The present numbers of one process."""
    families = [
        _Family(
            family.name,
            family.documentation,
            family.type,
            tuple(_Sample(s.name, tuple(sorted(s.labels.items())), s.value) for s in family.samples),
        )
        for family in registry.collect()
    ]
    return _encoder.encode(families)


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
        families: dict[str, _Family] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for of_one in self._packed:
            for family in _decoder.decode(of_one):
                families.setdefault(family.name, family)
                of_family = sums.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, sample.labels
                    if key not in of_family:
                        of_family[key] = sample.value
                    elif sample.name.endswith("_created"):
                        of_family[key] = min(of_family[key], sample.value)
                    else:
                        of_family[key] += sample.value
        for name, family in families.items():
            metric = Metric(name, family.text, family.kind)
            for (sample_name, labels), value in sums[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric
