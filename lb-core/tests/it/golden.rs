//! `tests/golden/*.yaml` → what the kernel holds, as text beside it. `UPDATE_EXPECT=1 cargo test` writes the text.

use std::{
    fs,
    path::{Path, PathBuf},
};

use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use lb_core::{convert, model::Change};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::kernel::Node;

#[test]
fn every_manifest_gives_the_maps_written_beside_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").path());
    let mut manifests: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    manifests.sort();
    assert!(!manifests.is_empty());
    let wrong: Vec<String> = manifests.iter().filter_map(|path| difference(path)).collect();
    assert!(wrong.is_empty(), "{}\nUPDATE_EXPECT=1 accepts what is", wrong.join("\n"));
}

fn difference(manifest: &Path) -> Option<String> {
    let mut node = Node::new(1000);
    let text = fs::read_to_string(manifest).expect("the manifest");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let mut errors = String::new();
    for document in documents {
        match changes(document) {
            Ok(changes) => node.reconciler.handle(changes),
            Err(error) => errors.push_str(&format!("error {error}\n")),
        }
    }
    node.settle();
    let problems = node.reconciler.problems().map(|problem| format!("problem {problem}\n"));
    let found = node.kernel.dump() + &errors + &problems.collect::<String>();
    let path = manifest.with_extension("txt");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(&path, &found).expect("the text");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    (found != expected).then(|| format!("{}\n--- expected\n{expected}--- found\n{found}", manifest.display()))
}

fn changes(document: Value) -> Result<Vec<Change>, convert::ConvertError> {
    match document["kind"].as_str() {
        Some("Service") => convert::service(&parse::<core::Service>(document)).map(|change| vec![change]),
        Some("EndpointSlice") => {
            convert::endpoint_slice(&parse::<discovery::EndpointSlice>(document)).map(|change| vec![change])
        }
        Some("Endpoints") => {
            let slices = convert::endpoints(&parse::<core::Endpoints>(document))?;
            Ok(slices.into_iter().map(|(name, slice)| Change::EndpointSlice(name, Some(slice))).collect())
        }
        kind => panic!("no test needs {kind:?}"),
    }
}

fn parse<T: DeserializeOwned>(document: Value) -> T {
    serde_json::from_value(document).expect("an object of its kind")
}
