"""deploy/monitoring: rules that are valid, fire when they should and are explained, and a sound dashboard."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.monitoring_files import (
    DASHBOARD,
    MONITORING,
    alert_rules,
    all_queries,
    dashboard,
    dashboard_queries,
)

PROMTOOL = shutil.which("promtool")
CASES = Path(__file__).with_name("alert_cases.yml")
OPERATIONS = MONITORING.parents[1] / "docs" / "operations.md"
ROLES = ("prefill", "decode", "router")
WIDTH = 24
"""Columns of a Grafana dashboard."""

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool; Debian's package prometheus has it"
)


def promtool(*arguments: str | Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_configuration_and_rules_are_valid() -> None:
    promtool("check", "config", MONITORING / "prometheus.yml")
    promtool("check", "rules", MONITORING / "alerts.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_at_no_other_time() -> None:
    promtool("test", "rules", CASES)


@needs_promtool
def test_the_dashboards_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": query.expression}
        for number, query in enumerate(dashboard_queries())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_every_alert_is_tried_and_explained() -> None:
    tests = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    names = {rule["alert"] for rule in alert_rules()}
    assert fired == quiet == names
    headings = re.findall(r"^#+ (HisparsePd\w+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(headings) == names
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert {"summary", "description"} < set(rule["annotations"])


def test_a_node_of_several_ranks_is_one_node() -> None:
    """A query aggregates over ranks, or it is about ranks and leaves out nodes of one."""
    assert len(all_queries()) == len(dashboard_queries()) + len(alert_rules())
    for query in all_queries():
        is_of_node = query.where.startswith("variable") or not query.by_rank
        assert is_of_node or 'dp_rank!=""' in query.expression, query


def test_scrapes_are_named_after_the_roles() -> None:
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [job["job_name"] for job in jobs] == list(ROLES)
    for job in jobs:
        (target,) = job["static_configs"][0]["targets"]
        assert target.partition(":")[0] == job["job_name"]
        assert job["file_sd_configs"] == [{"files": [f"targets/{job['job_name']}-*.yml"]}]


def test_the_dashboard_holds_together() -> None:
    shown = dashboard()
    assert shown["uid"] == "hisparse-pd"
    assert shown["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in shown["templating"]["list"]}
    assert set(variables) == {"datasource", "node"}
    assert variables["node"]["multi"]
    assert variables["node"]["includeAll"]
    panels = shown["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = set(product(columns, rows))
        assert cells.isdisjoint(taken), f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= WIDTH
        taken |= cells
        assert panel["type"] in ("row", "stat", "timeseries")
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables), f"{panel['title']}: unknown variable"
            is_of_nodes = not all(name.startswith("hisparse_pd:router_") for name in _names(target["expr"]))
            assert ("node" in used) is is_of_nodes, f"{panel['title']}: the variable node is for nodes"


def _names(expression: str) -> list[str]:
    return re.findall(r"hisparse_pd:\w+", expression)


def test_grafana_finds_dashboard_and_data_source() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    providers = yaml.safe_load((provisioning / "dashboards" / "hisparse-pd.yml").read_text(encoding="utf-8"))
    (provider,) = providers["providers"]
    assert provider["type"] == "file"
    readme = (MONITORING / "README.md").read_text(encoding="utf-8")
    assert f"{DASHBOARD.parent.relative_to(MONITORING)}:{provider['options']['path']}" in readme
