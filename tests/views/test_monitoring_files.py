"""Alert rules and the Grafana dashboard, against the metrics that are exported."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trinity_events.views.metrics import OPERATIONS, ServerMetrics

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
OTHERS = {"up"}
"""Metrics that Prometheus makes itself."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def text_of(*runs):
    metrics = ServerMetrics()
    for run in runs:
        metrics.add(run)
    return generate_latest(metrics.registry).decode()


@pytest.fixture(scope="module")
def exported():
    return {
        family.name + suffix
        for family in text_string_to_metric_families(text_of("run"))
        for suffix in SUFFIXES[family.type]
    }


def alerts():
    [group] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def dashboard():
    return json.loads((FOLDER / "grafana" / "trinity-events.json").read_text())


def expressions():
    yield from ((name, rule["expr"]) for name, rule in alerts().items())
    for panel in dashboard()["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def selected(expression):
    """Names of the metrics that an expression selects."""
    return set(re.findall(r"\b(?:trinity_\w+|up)\b", expression))


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_expression_is_promql_of_metrics_that_are_exported(where, expression, exported):
    promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    assert selected(expression), where
    assert selected(expression) <= exported | OTHERS, where


def test_every_metric_is_in_the_dashboard_or_an_alert(exported):
    shown = set().union(*(selected(expression) for _, expression in expressions()))
    derived = (
        "_sum",
        "_count",
        "_created",
    )  # what a histogram's buckets and a counter already tell
    assert {metric for metric in exported - shown if not metric.endswith(derived)} == {
        "trinity_epoch"
    }


def test_failures_are_counted_from_zero_so_that_an_alert_sees_the_first():
    text = text_of("run")
    assert 'trinity_save_failures_total{kind="state_dict",run="run"} 0.0' in text
    assert 'trinity_step_failures_total{kind="weights",run="run"} 0.0' in text


def test_each_metric_is_named_once_with_the_series_of_all_runs():
    text = text_of("a", "b")
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    for run in ("a", "b"):
        for operation in OPERATIONS:
            name = "trinity_rl_weight_update_operation_duration_seconds_count"
            assert f'{name}{{operation="{operation}",run="{run}"}} 0.0' in text


def test_every_alert_has_a_severity_and_names_the_way_out():
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"warning", "critical"}, name
        assert "`trinity-events " in rule["annotations"]["description"], name


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(at["x"] + at["w"] <= 24 for at in places)
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_the_files_and_the_rules_histories(arguments):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    done = subprocess.run(
        [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
