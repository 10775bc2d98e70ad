"""Checks deploy/ with the tools that its users have: Helm's own library, hadolint, the schemas of Kubernetes.

    python3 -m venv VENV && VENV/bin/pip install -r deploy/lint/requirements.txt && VENV/bin/python deploy/lint/check.py

With --write it renders the manifests beside the chart anew. What the manifests say is tested in Rust, by
`cargo test -p lb-agent deploy`.
"""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

DEPLOY = Path(__file__).resolve().parent.parent
CHART = DEPLOY / "chart"
HEADER = "# Made of the chart by deploy/lint/check.py --write; change that.\n"
RENDERED = {
    "lb-agent.yaml": DEPLOY / "lint/values-manifests.yaml",
    "kubeadm.yaml": DEPLOY / "lint/values-kubeadm.yaml",
}
# The oldest that the chart takes, and the newest that the validator of this version knows.
KUBERNETES = ["1.29", "1.36"]
WARNING = 2

EVERYTHING = {
    "image": {"repository": "registry.example/lb-agent", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "apiServer": {"host": "2001:db8::1", "port": 443},
    "config": {"cluster-cidr": ["10.244.0.0/16"], "masquerade-all": True},
    "capabilities": ["NET_ADMIN", "SYS_ADMIN"],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "affinity": {"podAntiAffinity": {}},
    "updateStrategy": {"type": "OnDelete"},
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
]


def render(values):
    files = Chart.load(CHART).render(values, name="lb-agent", namespace="kube-system", is_install=True)
    return "---\n".join(text.strip() + "\n" for _, text in sorted(files.items()) if text.strip())


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
        text = HEADER + render(yaml.safe_load(values.read_text()))
        path = DEPLOY / name
        if write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            problems.append(f"deploy/{name} is not what the chart renders: run check.py --write")
    return problems


def check_manifests():
    problems = []
    texts = {name: (DEPLOY / name).read_text() for name in RENDERED}
    texts["all values"] = render(EVERYTHING)
    for name, text in texts.items():
        for document in yaml.safe_load_all(text):
            for version in KUBERNETES:
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    problems.append(f"{name}, {document['kind']}, Kubernetes {version}: {error.message}")
    return problems


def check_image():
    run = subprocess.run(
        [Path(sys.executable).parent / "hadolint", "--no-color", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
    )
    return (run.stdout + run.stderr).splitlines() if run.returncode else []


def main():
    passed = [
        check("helm lint", check_lint()),
        check("values.schema.json", check_schema()),
        check("rendered manifests", check_rendered("--write" in sys.argv[1:])),
        check("schemas of Kubernetes", check_manifests()),
        check("hadolint", check_image()),
    ]
    failed = passed.count(False)
    print(f"{len(passed) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
