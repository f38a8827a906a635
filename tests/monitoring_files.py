"""Queries of the alerts and of the dashboard in deploy/monitoring, with the metrics that they name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "hisparse-pd.json"

SCRAPE_LABELS = frozenset(("instance", "job"))
"""Labels that Prometheus adds."""
RANK_LABEL = "dp_rank"
"""Label of an engine's metrics at nodes of several ranks."""

_SELECTOR = re.compile(r"(hisparse_pd:\w+)(?:\{([^}]*)\})?")
_WORDS_MATCHER = re.compile(r'(\w+)\s*=~?\s*"([\w|]+)"')
_LABEL_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_AGGREGATION = re.compile(r"\b(?:sum|min|max|count)(?: (?P<how>by|without) \((?P<labels>[^)]*)\))?\s*$")


@dataclass(frozen=True)
class Query:
    """One PromQL expression, and where it stands."""

    where: str
    expression: str

    @property
    def metrics(self) -> dict[str, set[str]]:
        """Names of our metrics, each with the labels that the query needs of it, the rank's not included."""
        grouping = {
            label.strip() for group in _GROUPING.findall(self.expression) for label in group.split(",")
        } - {RANK_LABEL}
        found: dict[str, set[str]] = {}
        for name, matchers in _SELECTOR.findall(self.expression):
            found.setdefault(name, set()).update(grouping, {*_LABEL_MATCHER.findall(matchers)} - {RANK_LABEL})
        return found

    @property
    def words(self) -> list[tuple[str, str, str, str]]:
        """Job ("" for any), metric, label and value of what selectors name; label "" for a metric alone."""
        found = []
        for name, matchers in _SELECTOR.findall(self.expression):
            named = {label: words.split("|") for label, words in _WORDS_MATCHER.findall(matchers)}
            jobs = named.pop("job", [""])
            for job in jobs:
                found.append((job, name, "", ""))
                found += [(job, name, label, word) for label, words in named.items() for word in words]
        return found

    @property
    def by_rank(self) -> set[str]:
        """Names of our metrics that the query does not aggregate over the ranks of a node."""
        return {
            match[1]
            for match in _SELECTOR.finditer(self.expression)
            if not match[1].startswith("hisparse_pd:router_") and not self._is_aggregated(match.start())
        }

    def _is_aggregated(self, position: int) -> bool:
        """Whether ``position`` is inside an aggregation that leaves out the rank."""
        depth = 0
        for index in range(position - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(self.expression[index], 0)
            if depth == -1:
                depth = 0
                found = _AGGREGATION.search(self.expression[:index])
                names_rank = found is not None and RANK_LABEL in (found["labels"] or "")
                if found is not None and (found["how"] == "without") is names_rank:
                    return True
        return False


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def dashboard_queries() -> list[Query]:
    """Queries of the panels, with Grafana's variables filled in, and queries of the variables."""
    found = [
        Query(f"panel {panel['title']!r}", _filled_in(target["expr"]))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            inside = re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])
            assert inside is not None, f"variable {variable['name']}: {variable['query']}"
            found.append(Query(f"variable {variable['name']!r}", inside[1]))
    return found


def all_queries() -> list[Query]:
    rules = [Query(f"alert {rule['alert']}", rule["expr"]) for rule in alert_rules()]
    return rules + dashboard_queries()


def _filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$node", ".*")
