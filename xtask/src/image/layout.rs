//! An image as the OCI defines it: an archive of blobs, named by their digests, with an index.

use flate2::Compression;
use serde_json::{Value, json};

use super::archive::{self, File, Files};
use crate::release::{gzip, sha256};

/// A layer of the image: files that it adds to those of the layers below.
#[derive(Debug)]
pub(super) struct Layer {
    /// The origin of the layer: a text for people, in the history of the image.
    pub(super) made_by: &'static str,
    pub(super) files: Files,
}

/// The metadata of the image.
#[derive(Debug)]
pub(super) struct About<'a> {
    /// Go's name of the processor, such as `amd64`.
    pub(super) architecture: &'static str,
    pub(super) entrypoint: &'a str,
    /// The arguments that a container gets if none are given.
    pub(super) arguments: &'static [&'static str],
    /// Repository and tag, such as `lb-agent` and `0.1.0`.
    pub(super) name: (&'static str, &'static str),
}

/// The files of the image. All times are `date`, in seconds since 1970.
pub(super) fn image(layers: &[Layer], about: &About<'_>, date: u64) -> anyhow::Result<Files> {
    let mut files = Files::new();
    let (mut descriptors, mut diff_ids, mut history) = (Vec::new(), Vec::new(), Vec::new());
    for layer in layers {
        let tar = archive::tar(&layer.files, date)?;
        diff_ids.push(format!("sha256:{}", sha256(&tar)));
        history.push(json!({"created_by": layer.made_by}));
        descriptors.push(add_blob(&mut files, "layer.v1.tar+gzip", gzip(&tar, Compression::default())?));
    }
    let config = json!({
        "architecture": about.architecture,
        "os": "linux",
        "config": {"Entrypoint": [about.entrypoint], "Cmd": about.arguments},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": history,
    });
    let config = add_blob(&mut files, "config.v1+json", serde_json::to_vec(&config)?);
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media_type("manifest.v1+json"),
        "config": config,
        "layers": descriptors,
    });
    let mut manifest = add_blob(&mut files, "manifest.v1+json", serde_json::to_vec(&manifest)?);
    let (repository, tag) = about.name;
    manifest["platform"] = json!({"architecture": about.architecture, "os": "linux"});
    // The first name is that of the specification; containerd reads the second one.
    manifest["annotations"] = json!({
        "org.opencontainers.image.ref.name": tag,
        "io.containerd.image.name": format!("docker.io/library/{repository}:{tag}"),
    });
    let index =
        json!({"schemaVersion": 2, "mediaType": media_type("index.v1+json"), "manifests": [manifest]});
    add(&mut files, "index.json", serde_json::to_vec(&index)?);
    add(&mut files, "oci-layout", serde_json::to_vec(&json!({"imageLayoutVersion": "1.0.0"}))?);
    Ok(files)
}

/// Adds a blob; returns the descriptor that refers to it.
fn add_blob(files: &mut Files, kind: &str, content: Vec<u8>) -> Value {
    let (digest, size) = (sha256(&content), content.len());
    add(files, &format!("blobs/sha256/{digest}"), content);
    json!({"mediaType": media_type(kind), "digest": format!("sha256:{digest}"), "size": size})
}

fn add(files: &mut Files, path: &str, content: Vec<u8>) {
    files.insert(path.to_owned(), File { mode: 0o644, content });
}

fn media_type(kind: &str) -> String {
    format!("application/vnd.oci.image.{kind}")
}
