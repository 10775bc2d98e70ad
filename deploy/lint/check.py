"""Checks deploy/ with the tools that its users have: Helm's own library, hadolint, the schemas of Kubernetes, Prometheus' own
promtool (of Debian's package prometheus; in the PATH, or PROMTOOL says where).

    python3 -m venv VENV && VENV/bin/pip install -r deploy/lint/requirements.txt && VENV/bin/python deploy/lint/check.py

With --write it renders the manifests beside the chart anew, and copies into it what Helm takes only from there. With --package DIR
it also writes the chart there as an archive for a chart repository. What the manifests say is tested in Rust, by `cargo test -p lb-agent deploy`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from helm_python.chart import Chart, lint, package
from helm_python.errors import HelmError

from chart import CHART, DEPLOY, render, schema_problems
from values import check_values, installed

HEADER = "# Rendered from the chart by deploy/lint/check.py --write; edit the chart.\n"
RENDERED = {
    "lb-agent.yaml": yaml.safe_load((DEPLOY / "lint/values-manifests.yaml").read_text()),
    "kubeadm.yaml": yaml.safe_load((DEPLOY / "lint/values-kubeadm.yaml").read_text()),
    "lint/controller.yaml": yaml.safe_load((DEPLOY / "lint/values-controller.yaml").read_text()),
    # A class that no Lease can be named after.
    "lint/lease.yaml": {"apiServer": {"host": "API_SERVER"}, "loadBalancerController": {"enabled": True, "class": "example.com/my_lb"}},
    # What the command of deploy/README.md installs that moves a cluster node by node.
    "lint/migration.yaml": installed((DEPLOY / "README.md").read_text(), "nodeSelector"),
}
RULES = DEPLOY / "alerts/lb-agent.rules.yaml"
RULE_TESTS = DEPLOY / "alerts/lb-agent.tests.yaml"
DASHBOARD = DEPLOY / "grafana/lb-agent.json"
SEVERITIES = ["critical", "warning", "info"]
WARNING = 2

EVERYTHING = {
    "image": {"repository": "registry.example/lb-agent", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "apiServer": {"host": "2001:db8::1", "port": 443},
    "config": {"cluster-cidr": ["10.244.0.0/16"], "masquerade-all": True, "dns-intercept": "kube-system/kube-dns"},
    "capabilities": ["NET_ADMIN", "SYS_ADMIN"],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "affinity": {"podAntiAffinity": {}},
    "updateStrategy": {"type": "OnDelete"},
    "loadBalancerController": {"enabled": True, "class": "example.com/lb", "reassign": True},
    "announce": {"enabled": True, "keySecret": "key", "port": 7000, "prefer": "single"},
    "bgp": {"enabled": True, "image": "registry.example/bird:2", "table": 200, "lifetime": 60, "passwordSecrets": ["a/b", "c/123"]},
    "test": {"image": "registry.example/busybox:1"},
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
REFUSED = [
    {"unknown": 1},
    {"apiServer": {"host": "https://192.0.2.1", "port": 6443}},
    {"apiServer": {"host": "192.0.2.1", "port": "6443"}},
    {"image": {"repository": ""}},
    {"paths": {"bpffs": "sys/fs/bpf"}},
    {"capabilities": ["BPF"]},
    {"capabilities": ["CAP_NET_ADMIN", "NET_ADMIN", "cap"]},
    {"configKey": "a/b"},
    {"loadBalancerController": {"enabled": "yes"}},
    {"loadBalancerController": {"class": "a b"}},
    {"loadBalancerController": {"reassign": "yes"}},
    {"announce": {"enabled": "yes"}},
    {"announce": {"keySecret": ""}},
    {"announce": {"port": 0}},
    {"announce": {"prefer": "both"}},
    {"bgp": {"enabled": "yes"}},
    {"bgp": {"image": ""}},
    {"bgp": {"table": 0}},
    {"bgp": {"lifetime": "30s"}},
    {"bgp": {"passwordSecrets": ["name"]}},
    {"test": {"image": True}},
    {"test": {"image": "busy box"}},
    {"monitoring": {"serviceMonitor": {"enabled": "yes"}}},
    {"monitoring": {"serviceMonitor": {"interval": "often"}}},
]


def check(name, problems):
    print(f"{name}: {'ok' if not problems else 'FAILED'}")
    for problem in problems:
        print(f"  {problem}")
    return not problems


def check_lint():
    report = lint(CHART, strict=True)
    found = [f"{m['path']}: {m['error']}" for m in report["messages"] if m["severity"] >= WARNING]
    return report["errors"] + found


def check_schema():
    problems = []
    chart = Chart.load(CHART)
    for values in REFUSED:
        try:
            chart.validate_schema(values)
            problems.append(f"values.schema.json takes {values}")
        except HelmError:
            pass
    return problems


def check_rendered(write):
    problems = []
    for name, values in RENDERED.items():
        text = HEADER + render(values)
        path = DEPLOY / name
        if write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            problems.append(f"deploy/{name} is not what the chart renders: run check.py --write")
    return problems


def check_copies(write):
    problems = []
    for source in (RULES, DASHBOARD):
        copy = CHART / "files" / source.name
        if write:
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(source.read_text())
        elif not copy.exists() or copy.read_text() != source.read_text():
            problems.append(f"{copy} is not {source}: run check.py --write")
    return problems


def promtool(*arguments):
    """What it complains about."""
    command = [os.environ.get("PROMTOOL", "promtool"), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return [f"{command[0]} is not installed: it is in Debian's package prometheus (PROMTOOL says where it is)"]
    return (run.stdout + run.stderr).splitlines() if run.returncode else []


def check_rules():
    problems, names = promtool("check", "rules", RULES), []
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            name = rule["alert"]
            names.append(name)
            if rule["labels"].get("severity") not in SEVERITIES:
                problems.append(f"{name}: severity is none of {SEVERITIES}")
            if not re.fullmatch("[0-9]+[smh]", rule.get("for", "")):
                problems.append(f"{name}: no `for`")
            for text in ("summary", "runbook"):
                if not rule["annotations"].get(text, "").strip():
                    problems.append(f"{name}: no {text}")
    problems += [f"{name} is there twice" for name in set(names) if names.count(name) > 1]
    return problems


def check_rule_tests():
    """Each alert fires on series made for it, and none on those of a healthy node."""
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    tested = [test["name"] for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]]
    problems = [f"{name} has no test in {RULE_TESTS.name}" for name in rules if name not in tested]
    return problems + promtool("test", "rules", RULE_TESTS)


def check_expressions(expressions):
    """As rules, for Prometheus takes an expression from nowhere else without a server."""
    # Variables that Grafana fills in.
    expressions = [expression.replace("$__rate_interval", "5m") for expression in expressions]
    rules = [{"record": f"expression_{number}", "expr": text} for number, text in enumerate(expressions, 1)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        return promtool("check", "rules", file.name)


def check_dashboard():
    dashboard = json.loads(DASHBOARD.read_text())
    problems, places, expressions = [], set(), []
    for panel in dashboard["panels"]:
        if panel["type"] != "row" and not panel["description"]:
            problems.append(f"{panel['title']}: no description")
        for target in panel.get("targets", []):
            expressions.append(target["expr"])
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        if cells & places or place["x"] + place["w"] > 24:
            problems.append(f"{panel['title']}: lies on another panel")
        places |= cells
    return problems + check_expressions(expressions)


def check_monitoring_of_chart():
    """The objects of the chart hold the files, and are made only where that is asked for."""
    made = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(render(EVERYTHING))}
    usual = {d["kind"] for d in yaml.safe_load_all(render({}))}
    problems = []
    rule = made.get(("PrometheusRule", "lb-agent"), {})
    if rule.get("spec") != yaml.safe_load(RULES.read_text()):
        problems.append("the PrometheusRule is not deploy/alerts/lb-agent.rules.yaml")
    config = made.get(("ConfigMap", "lb-agent-dashboard"), {"data": {"lb-agent.json": "{}"}})
    if json.loads(config["data"]["lb-agent.json"]) != json.loads(DASHBOARD.read_text()):
        problems.append("the ConfigMap is not deploy/grafana/lb-agent.json")
    monitor = made.get(("ServiceMonitor", "lb-agent"))
    service = made.get(("Service", "lb-agent"), {"metadata": {"labels": {}}})
    if monitor and {"targetLabel": "job", "replacement": "lb-agent"} not in monitor["spec"]["endpoints"][0].get("relabelings", []):
        problems.append("the job of the ServiceMonitor is not lb-agent, which the alerts look for")
    if not monitor or not monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items():
        problems.append("the ServiceMonitor finds no Service")
    problems += [f"{kind} is made although no value asks for it" for kind in usual & {"PrometheusRule", "ServiceMonitor", "Service"}]
    return problems


def check_manifests():
    texts = {name: (DEPLOY / name).read_text() for name in RENDERED}
    texts["all values"] = render(EVERYTHING)
    return [problem for name, text in texts.items() for problem in schema_problems(name, text)]


def check_roles():
    """The agent may list Namespaces only if it needs their names."""
    problems = []
    for config, expected in [({}, False), ({"dns-intercept": "a/b"}, True), ({"dnsBindAddress": "192.0.2.1"}, True)]:
        roles = [d for d in yaml.safe_load_all(render({"config": config})) if d["kind"] == "ClusterRole"]
        found = any("namespaces" in rule["resources"] for role in roles for rule in role["rules"])
        if found != expected:
            problems.append(f"with the configuration {config}, the role {'has' if found else 'lacks'} namespaces")
    for config, expected in [({}, False), ({"dns-intercept": "a/b"}, False), ({"dnsBindAddress": "192.0.2.1"}, True)]:
        [pods] = [d["spec"]["template"]["spec"] for d in yaml.safe_load_all(render({"config": config})) if d["kind"] == "DaemonSet"]
        added = [c["securityContext"]["capabilities"]["add"] for c in pods["containers"] if c["name"] == "lb-agent"]
        if ("NET_BIND_SERVICE" in added[0]) != expected:
            problems.append(f"with the configuration {config}, the agent has the capabilities {added[0]}")
    return problems


def check_package(folder):
    """The chart as an archive, in this folder if there is one, renders what the chart itself renders."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(package(CHART, destination=folder or temporary))
        same = render(EVERYTHING, archive) == render(EVERYTHING)
    return [] if same else [f"{archive.name} does not render as the chart"]


def check_image():
    run = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "--no-color", DEPLOY / "Dockerfile", DEPLOY / "bird.Dockerfile"],
        capture_output=True,
        text=True,
    )
    return (run.stdout + run.stderr).splitlines() if run.returncode else []


def main():
    folder = sys.argv[sys.argv.index("--package") + 1] if "--package" in sys.argv else None
    passed = [
        check("helm lint", check_lint()),
        check("values.schema.json", check_schema()),
        check("copies in the chart", check_copies("--write" in sys.argv[1:])),
        check("rendered manifests", check_rendered("--write" in sys.argv[1:])),
        check("alert rules", check_rules()),
        check("tests of alert rules", check_rule_tests()),
        check("dashboard", check_dashboard()),
        check("monitoring objects of the chart", check_monitoring_of_chart()),
        check("schemas of Kubernetes", check_manifests()),
        check("each documented value", check_values()),
        check("roles of the chart", check_roles()),
        check("archive of the chart", check_package(folder)),
        check("hadolint", check_image()),
    ]
    failed = passed.count(False)
    print(f"{len(passed) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
