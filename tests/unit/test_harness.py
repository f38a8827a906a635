"""What the tests with real nodes read of them."""

from __future__ import annotations

from service.engine_messages import EngineStats
from service.metrics import FrontMetrics
from tests.integration.harness import samples_of


def test_samples_are_summed_over_ranks() -> None:
    gauges = {"num_running_reqs": 2.0, 'pool_used_tokens{pool="host"}': 42.0}
    gauges['transfer_info{devices="a,b",protocol="rdma",reason="asked for"}'] = 1.0  # dp_rank amid others
    stats = EngineStats(gauges, {'generation_tokens_total{mode="dense"}': 7.0}, 0, 0, 0, 5)

    def samples(num_ranks: int) -> dict[str, float]:
        metrics = FrontMetrics(num_ranks)
        for rank in range(num_ranks):
            metrics.update(rank, stats)
        return samples_of(metrics.render().decode())

    one, twelve = samples(1), samples(12)
    assert one["hisparse_pd:num_running_reqs"] == 2
    assert one['hisparse_pd:generation_tokens_total{mode="dense"}'] == 7
    assert twelve.keys() == one.keys()
    of_engines = [*gauges, *stats.counters, "engine_steps_total"]
    for name in (f"hisparse_pd:{name}" for name in of_engines):
        assert twelve[name] == 12 * one[name], name
    assert samples_of('x{a="b",dp_rank="0"} 1\nx{a="b",dp_rank="1"} 2\n') == {'x{a="b"}': 3}
