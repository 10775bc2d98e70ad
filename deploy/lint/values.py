"""The values of the chart: each one that values.yaml or a page documents changes what the chart renders, into manifests that the
schemas of Kubernetes allow, and the templates read no other values.

What is tried for a value: the other booleans, the other values of an enum, another number, the examples in its comment in
values.yaml (`# Example: YAML`), and what the pages pass by `--set`, `--set-string` and `--set-json`.
"""

import json
import re
from pathlib import Path

import yaml
from helm_python.errors import HelmError

from chart import CHART, DEPLOY, render, schema_problems

KEY = re.compile(r"( *)(\w+):")
EXAMPLE = re.compile(r" *# Example: (.+)")
# A command of Helm, whose lines but the last end in a backslash.
COMMAND = re.compile(r"helm install (?:.*\\\n)*.*")
OPTION = re.compile(r"--set(|-string|-json)[ =]('[^']+'|[^\s'`]+)")
NAME = re.compile(r"`(\w+\.[\w.]+)`")
READ = re.compile(r"\.Values((?:\.\w+)*)")
# Helm hands these to all charts.
OF_HELM = {("global",)}
# Values without which others have no effect; all booleans are true beside them.
ENABLED = {"apiServer": {"host": "192.0.2.1"}}


def at(tree, path):
    """The part of a tree of maps at a path; None if there is none."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def tree(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


def merged(one, other):
    both = {name: merged(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return one | other | both


def dotted(path):
    return ".".join(path)


class Values:
    """The values of a chart, by values.yaml, values.schema.json and pages that show how to set them."""

    def __init__(self, chart=CHART, pages=None):
        self.chart = chart
        text = (chart / "values.yaml").read_text()
        self.defaults = yaml.safe_load(text)
        self.schema = json.loads((chart / "values.schema.json").read_text())
        self.leaves = dict(self.find(self.schema))
        self.examples = examples(text)
        self.pages = pages_of_users() if pages is None else pages
        self.options = [option for page in self.pages for option in options(page)]

    def find(self, node, path=()):
        """The values with what the schema says about them; a map of any content is one value."""
        node = self.schema["definitions"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        if "properties" not in node:
            yield path, node
            return
        for name, child in node["properties"].items():
            if path + (name,) not in OF_HELM:
                yield from self.find(child, path + (name,))

    def others(self, path):
        """Values to try instead of the default."""
        node, default = self.leaves[path], at(self.defaults, path)
        found = [*self.examples.get(path, []), *node.get("enum", [])]
        found += [at(given, path) for given in self.options if at(given, path) is not None]
        if isinstance(default, bool):
            found.append(not default)
        elif isinstance(default, int):
            found.append(default + 1)
        return [value for place, value in enumerate(found) if value != default and value not in found[:place]]

    def has(self, path):
        """Whether the path leads to a value, or into one."""
        return any(path[: len(leaf)] == leaf for leaf in self.leaves)

    def bases(self):
        """The defaults, and a chart in which everything is enabled: many values matter only there."""
        enabled = ENABLED
        for path, node in self.leaves.items():
            if node.get("type") == "boolean":
                enabled = merged(enabled, tree(path, True))
        return [{}, enabled]


def examples(text):
    """The examples in the comments of values.yaml, by the value that follows them."""
    found, path, waiting = {}, [], []
    for line in text.splitlines():
        if example := EXAMPLE.fullmatch(line):
            waiting.append(yaml.safe_load(example[1]))
        elif key := KEY.match(line):
            path = [(indent, name) for indent, name in path if indent < len(key[1])] + [(len(key[1]), key[2])]
            found.setdefault(tuple(name for _, name in path), []).extend(waiting)
            waiting = []
    return found


def pages_of_users():
    return [path.read_text() for path in (DEPLOY.parent / "README.md", DEPLOY / "README.md", *sorted((DEPLOY.parent / "docs").glob("*.md")))]


def options(page):
    """The values that commands of a page set, one tree for each option."""
    for kind, text in OPTION.findall(page):
        name, is_given, value = text.strip("'").partition("=")
        if is_given:
            yield tree(name.split("."), value if kind == "-string" else yaml.safe_load(value))


def installed(page, word):
    """The values that the only `helm install` of a page with this word in it sets."""
    [command] = [command for command in COMMAND.findall(page) if word in command]
    values = {}
    for option in options(command):
        values = merged(values, option)
    return values


def read_problems(values):
    """What templates read although no value documents it."""
    problems = []
    for template in sorted(Path(values.chart, "templates").rglob("*.*")):
        for name in {name.lstrip(".") for name in READ.findall(template.read_text())}:
            path = tuple(name.split("."))
            if not values.has(path):
                reason = "names no single value" if at(values.defaults, path) else "is not in values.yaml"
                problems.append(f"{template.name} reads .Values.{name}, which {reason}: templates name each documented value in full")
    return problems


def page_problems(values):
    """What pages set or name although it is no value of the chart."""
    maps = {path[:length] for path in values.leaves for length in range(1, len(path))}
    problems = [f"a page sets {given}, which is no value" for given in values.options if not sets_any(given, values.leaves)]
    for page in values.pages:
        names = (tuple(name.split(".")) for name in NAME.findall(page))
        problems += [f"a page names `{dotted(path)}`, which is no value" for path in names if path[:1] in maps and path not in maps and not values.has(path)]
    return problems


def sets_any(given, leaves):
    return any(at(given, leaf) is not None for leaf in leaves)


def other(base, path, value):
    """The value, or its opposite if it is a boolean that the base has already."""
    return not value if isinstance(value, bool) and at(base, path) == value else value


def effect_problems(values, path):
    """Whether each other value can be rendered and changes something."""
    others = values.others(path)
    if not others:
        return [f"{dotted(path)} has no example: add `# Example: …` to its comment in values.yaml"]
    problems, bases = [], [(base, render(base, values.chart)) for base in values.bases()]
    for value in others:
        name = f"{dotted(path)}: {json.dumps(value)}"
        try:
            texts = [render(merged(base, tree(path, other(base, path, value))), values.chart) for base, _ in bases]
        except HelmError as error:
            problems.append(f"{name} cannot be rendered: {error}")
            continue
        if all(text == usual for text, (_, usual) in zip(texts, bases)):
            problems.append(f"{name} changes nothing: no template reads it, or only beside a value that ENABLED lacks")
        problems += [problem for text in texts for problem in schema_problems(name, text)]
    return problems


def check_values(values=None):
    values = values or Values()
    problems = [f"values.yaml does not document {dotted(path)}" for path in values.leaves if at(values.defaults, path) is None]
    problems += read_problems(values) + page_problems(values)
    for path in values.leaves:
        problems += effect_problems(values, path)
    return problems
