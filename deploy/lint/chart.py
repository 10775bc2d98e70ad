"""The chart as Helm renders it, and what the schemas of Kubernetes say about the result."""

from pathlib import Path

import kubernetes_validate
import yaml
from helm_python.chart import Chart

DEPLOY = Path(__file__).resolve().parent.parent
CHART = DEPLOY / "chart"
# Kinds of the Prometheus operator: the Kubernetes schemas do not contain them.
MONITORING = "monitoring.coreos.com/v1"
# The oldest Kubernetes version that the chart supports, and the newest one that this validator supports.
KUBERNETES = ["1.29", "1.36"]


def render(values, chart=CHART):
    loaded = Chart.load(chart) if chart.is_dir() else Chart.load_archive(chart.read_bytes())
    files = loaded.render(values, name="lb-agent", namespace="kube-system", is_install=True)
    return "---\n".join(text.strip() + "\n" for _, text in sorted(files.items()) if text.strip())


def schema_problems(name, text):
    """Where the manifests differ from the schemas of Kubernetes; `name` says what was rendered."""
    problems = []
    for document in yaml.safe_load_all(text):
        if document["apiVersion"] == MONITORING:
            continue
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                problems.append(f"{name}, {document['kind']}, Kubernetes {version}: {error.message}")
    return problems
