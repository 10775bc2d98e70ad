"""The checks of values.py find each kind of mistake, in copies of the chart that have it."""

import re
import shutil
import tempfile
import unittest
from pathlib import Path

from chart import CHART
from values import Values, effect_problems, examples, installed, options, page_problems, read_problems


class Mistakes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.chart = shutil.copytree(CHART, Path(folder.name) / "chart")

    def change(self, name, old, new):
        path = self.chart / name
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new))

    def effects(self, *path):
        return effect_problems(Values(self.chart, []), path)

    def test_value_that_templates_read_has_no_problem(self):
        self.assertEqual(self.effects("announce", "prefer") + self.effects("podLabels"), [])

    def test_value_that_no_template_reads_is_found(self):
        self.change("templates/daemonset.yaml", "{{ .Values.announce.prefer | quote }}", "availability")
        self.assertRegex(self.effects("announce", "prefer")[0], 'announce.prefer: "single" changes nothing')

    def test_value_without_an_example_is_found(self):
        self.change("values.yaml", "# Example: {team: network}", "#")
        self.assertRegex(self.effects("podLabels")[0], "podLabels has no example")

    def test_example_that_the_chart_refuses_is_found(self):
        self.change("values.yaml", "# Example: /mnt/bpf", "# Example: mnt/bpf")
        self.assertRegex(self.effects("paths", "bpffs")[0], 'paths.bpffs: "mnt/bpf" cannot be rendered')

    def test_example_that_kubernetes_refuses_is_found(self):
        self.change("values.yaml", "[{key: node-role", "[{keys: node-role")
        self.assertRegex(self.effects("tolerations")[0], "DaemonSet, Kubernetes 1.29.*keys")

    def test_undocumented_value_that_a_template_reads_is_found(self):
        self.change("templates/daemonset.yaml", ".Values.podLabels", ".Values.labels.ofPods")
        [problem] = read_problems(Values(self.chart, []))
        self.assertRegex(problem, "daemonset.yaml reads .Values.labels.ofPods, which is not in values.yaml")

    def test_value_that_a_template_does_not_name_in_full_is_found(self):
        self.change("templates/daemonset.yaml", "if .Values.bgp.enabled", "with .Values.bgp")
        [problem] = read_problems(Values(self.chart, []))
        self.assertRegex(problem, ".Values.bgp, which names no single value")

    def test_pages_that_set_or_name_unknown_values_are_found(self):
        page = "helm install x deploy/chart --set bgp.on=true --set-string nodeSelector.a=true; `bgp.image`, `bgp.picture`, `a.b`"
        problems = page_problems(Values(self.chart, [page]))
        self.assertEqual(len(problems), 2, problems)
        self.assertTrue(re.search("sets .*bgp.*on", problems[0]) and "bgp.picture" in problems[1], problems)


class Sources(unittest.TestCase):
    def test_examples_belong_to_the_next_key(self):
        text = "a:\n  # Example: [1]\n  # Example: [2]\n  b: []\n  c: {}\nd: 1\n"
        found = {path: values for path, values in examples(text).items() if values}
        self.assertEqual(found, {("a", "b"): [[1], [2]]})

    def test_options_are_read_as_helm_reads_them(self):
        page = "--set a.b=true --set-string c=true --set-json 'd={\"e\": [1]}' --set `x`"
        self.assertEqual(list(options(page)), [{"a": {"b": True}}, {"c": "true"}, {"d": {"e": [1]}}])

    def test_values_of_one_command_are_merged(self):
        page = "helm install a b --set x.y=1\n\nhelm install a b \\\n  --set x.y=2 \\\n  --set-string x.z=true\nhelm lint --set x.y=3\n"
        self.assertEqual(installed(page, "x.z"), {"x": {"y": 2, "z": "true"}})


if __name__ == "__main__":
    unittest.main()
