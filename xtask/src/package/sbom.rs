//! A software bill of materials: the crates in the agent, as CycloneDX describes them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::process::cargo;
use crate::release;

/// The part of the output of `cargo metadata` that the bill needs.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

/// The kind of a dependency: `None` if the program itself needs it, not only its tests or build scripts.
#[derive(Debug, Deserialize)]
struct Kind {
    kind: Option<String>,
}

/// The bill of the agent on this platform: the crates that it needs to run, directly or through other crates, without
/// dependencies of tests and build scripts. Optional crates count if anything in the workspace turns them on.
pub(super) fn of_agent() -> anyhow::Result<Vec<u8>> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let metadata = release::output(cargo([
        "metadata",
        "--locked",
        "--format-version",
        "1",
        "--filter-platform",
        &platform,
    ]))?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("cannot read the output of `cargo metadata`")?;
    let mut text = serde_json::to_vec_pretty(&bill(&metadata, "lb-agent")?)?;
    text.push(b'\n');
    Ok(text)
}

/// The bill of a program of the workspace.
fn bill(metadata: &Metadata, program: &str) -> anyhow::Result<Value> {
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let package =
        |id: &str| packages.get(id).copied().with_context(|| format!("cargo metadata has no package {id}"));
    let root = metadata.packages.iter().find(|package| package.name == program);
    let root = root.with_context(|| format!("cargo metadata has no package {program}"))?;
    let (mut components, mut graph) = (BTreeMap::new(), BTreeMap::new());
    for (id, dependencies) in reachable(metadata, &root.id) {
        let of = package(id)?;
        if id != root.id {
            components.insert(purl(of), component(of, "library"));
        }
        let mut names =
            dependencies.into_iter().map(|id| Ok(purl(package(id)?))).collect::<anyhow::Result<Vec<_>>>()?;
        names.sort();
        graph.insert(purl(of), names);
    }
    let graph: Vec<_> = graph.into_iter().map(|(name, on)| json!({"ref": name, "dependsOn": on})).collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(root, "application")},
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": graph,
    }))
}

/// The packages that `root` needs to run, including `root` itself, each with its direct dependencies.
fn reachable<'a>(metadata: &'a Metadata, root: &'a str) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let nodes: BTreeMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let (mut found, mut next) = (BTreeMap::new(), vec![root]);
    while let Some(id) = next.pop() {
        if found.contains_key(id) {
            continue;
        }
        let all = nodes.get(id).into_iter().flat_map(|node| &node.deps);
        let needed = all.filter(|dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()));
        let needed: BTreeSet<&str> = needed.map(|dependency| dependency.pkg.as_str()).collect();
        next.extend(&needed);
        found.insert(id, needed);
    }
    found
}

fn component(package: &Package, kind: &str) -> Value {
    let mut component = json!({
        "type": kind,
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
    });
    if let Some(license) = &package.license {
        // Old crates write `MIT/Apache-2.0`, which is no SPDX expression.
        let expression = license.replace(" / ", " OR ").replace('/', " OR ");
        component["licenses"] = json!([{"expression": expression}]);
    }
    component
}

/// The package URL, which names the package in the bill.
fn purl(Package { name, version, .. }: &Package) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let package = |name: &str, license: &str| json!({"id": name, "name": name, "version": "1.0.0+x", "license": license});
        let dependency = |name: &str, kinds: &[Option<&str>]| {
            let kinds: Vec<_> = kinds.iter().map(|kind| json!({"kind": kind, "target": null})).collect();
            json!({"name": name, "pkg": name, "dep_kinds": kinds})
        };
        let only = |kind| vec![kind];
        serde_json::from_value(json!({
            "packages": [package("agent", "MIT"), package("used", "MIT/Apache-2.0"), package("deep", "ISC"),
                package("tested", "MIT"), package("built", "MIT"), package("other", "MIT")],
            "resolve": {"nodes": [
                {"id": "agent", "deps": [dependency("used", &[Some("dev"), None]), dependency("tested", &only(Some("dev"))),
                    dependency("built", &only(Some("build")))]},
                {"id": "used", "deps": [dependency("deep", &only(None))]},
                {"id": "deep", "deps": [dependency("used", &only(None))]},
                {"id": "other", "deps": []},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn bill_lists_what_the_program_needs_and_nothing_else() {
        let bill = bill(&metadata(), "agent").unwrap();
        let names: Vec<_> =
            bill["components"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["deep", "used"]);
        assert_eq!(bill["metadata"]["component"]["name"], "agent");
        assert_eq!(bill["components"][1]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let expected = json!({"ref": "pkg:cargo/agent@1.0.0%2Bx", "dependsOn": ["pkg:cargo/used@1.0.0%2Bx"]});
        assert_eq!(bill["dependencies"][0], expected);
    }

    #[test]
    fn every_reference_of_the_agents_bill_is_a_component() {
        let bill: Value = serde_json::from_slice(&of_agent().unwrap()).unwrap();
        let components = bill["components"].as_array().unwrap();
        let mut names: BTreeSet<&str> = components.iter().map(|it| it["bom-ref"].as_str().unwrap()).collect();
        assert_eq!(names.len(), components.len(), "each is there once");
        assert!(names.iter().any(|name| name.starts_with("pkg:cargo/aya@")), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("pkg:cargo/proptest@")), "a dependency of tests");
        assert!(components.iter().all(|it| it["licenses"].is_array()), "a crate has no licence");
        names.insert(bill["metadata"]["component"]["bom-ref"].as_str().unwrap());
        for entry in bill["dependencies"].as_array().unwrap() {
            let on = entry["dependsOn"].as_array().unwrap();
            assert!(
                on.iter().chain([&entry["ref"]]).all(|name| names.contains(name.as_str().unwrap())),
                "{entry}"
            );
        }
    }
}
