//! `bugreport`: an archive with the state of a node, for the maintainers.
//!
//! The archive contains no environment variables, no credentials and not the agent's configuration file, only the
//! settings that a running agent shows at `/configz` and `/flagz`. It does identify machines and pods: it contains
//! addresses, names of Services and pods, and connections. `errors.txt` lists files that could not be collected.

mod archive;
mod host;
mod web;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use lb_common::LAYOUT_VERSION;
use serde::Serialize;

use super::{check, conntrack, output, profile, service_view, status};
use crate::{
    cli::{BugreportArgs, FlowFilter},
    config::KernelPaths,
};
use lb_datapath::{Conntrack, Pinned};

/// Maximum number of connections that the archive lists.
const CONNECTIONS: usize = 1000;
/// Duration of the measurement that the archive's profile of the BPF programs comes from.
const PROFILE: Duration = Duration::from_secs(1);

/// The files collected so far, and the errors of files that could not be collected.
#[derive(Debug, Default)]
struct Collection {
    files: Vec<(String, Vec<u8>)>,
    errors: Vec<String>,
}

impl Collection {
    /// Adds a file to the archive, or the error that occurred while collecting it.
    fn add(&mut self, name: &str, content: anyhow::Result<Vec<u8>>) {
        match content {
            Ok(bytes) => self.files.push((name.to_owned(), bytes)),
            Err(error) => self.errors.push(format!("{name}: {error:#}")),
        }
    }

    fn add_text(&mut self, name: &str, text: anyhow::Result<String>) {
        self.add(name, text.map(String::into_bytes));
    }

    fn add_json(&mut self, name: &str, value: anyhow::Result<impl Serialize>) {
        self.add(name, value.and_then(|value| Ok(serde_json::to_vec_pretty(&value)?)));
    }
}

/// Runs `bugreport`.
///
/// # Errors
/// The archive or standard output cannot be written.
pub fn bugreport(paths: &KernelPaths, args: &BugreportArgs) -> anyhow::Result<()> {
    let now = Timestamp::now();
    let name = format!("lb-agent-bugreport-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    let to_stdout = path.as_os_str() == "-";
    // Creates the archive first, so that an unwritable path fails before the collection.
    let mut file: Box<dyn io::Write> =
        if to_stdout { Box::new(archive::stdout()?) } else { Box::new(archive::create(&path)?) };
    let mut collection = collect(paths, args, now);
    let errors = collection.errors.clone();
    collection.add_text("errors.txt", Ok(said(&errors)));
    let written = archive::write(&mut file, &name, &collection.files, now);
    if written.is_err() && !to_stdout {
        archive::discard(&path);
    }
    written.with_context(|| format!("cannot write {}", path.display()))?;
    if to_stdout { Ok(()) } else { output::print(&summary(&path, collection.files.len(), &errors)) }
}

fn said(errors: &[String]) -> String {
    if errors.is_empty() { "Everything was collected.\n".to_owned() } else { errors.join("\n") + "\n" }
}

fn summary(path: &Path, files: usize, errors: &[String]) -> String {
    let mut text = format!(
        "Wrote {files} files to {}. They name addresses, Services and pods of this cluster, but hold no credentials.\n",
        path.display()
    );
    for error in errors {
        text.push_str(&format!("not collected: {error}\n"));
    }
    text
}

fn collect(paths: &KernelPaths, args: &BugreportArgs, now: Timestamp) -> Collection {
    let mut collection = Collection::default();
    collection.add_text("version.txt", Ok(version(now)));
    collection.add_json("check.json", check::value(&paths.bpffs).map_err(Into::into));
    match Pinned::open(&paths.bpffs) {
        Ok(pinned) => {
            collection.add_json("status.json", status::look(paths, &pinned));
            data_plane(&mut collection, &pinned);
        }
        Err(error) => collection.errors.push(format!("data plane: {error}")),
    }
    for (name, path) in [("config.json", "/configz"), ("flags.txt", "/flagz"), ("metrics.txt", "/metrics")] {
        collection.add(name, web::get(&args.metrics_address, path));
    }
    host::collect(&mut collection);
    collection
}

fn version(now: Timestamp) -> String {
    format!(
        "lb-agent {}\nlayout of the maps: {LAYOUT_VERSION}\ncollected: {now}\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// Collects the files about the data plane in the kernel: Services, connections, BPF objects, a profile of the
/// programs. Also adds where the agent's log is.
fn data_plane(collection: &mut Collection, pinned: &Pinned) {
    collection.add_json("services.json", services(pinned));
    match connections(pinned) {
        Ok((summary, listed)) => {
            collection.add_json("conntrack-summary.json", Ok(summary));
            collection.add_json("conntrack.json", Ok(listed));
        }
        Err(error) => collection.errors.push(format!("conntrack.json: {error:#}")),
    }
    collection.add_json("bpf.json", pinned.objects().map_err(Into::into));
    collection.add_json("profile.json", profile::count(pinned, PROFILE, thread::sleep));
    collection.add_text("log.txt", Ok(host::log_location(pinned.agent().as_deref())));
}

fn services(pinned: &Pinned) -> anyhow::Result<Vec<service_view::ServiceView>> {
    Ok(service_view::services(&pinned.maps().contents()?))
}

/// Numbers of connections: all of them, those listed in the archive, those in each phase, and those of each Service.
#[derive(Debug, Serialize)]
struct Summary {
    connections: usize,
    listed: usize,
    phases: BTreeMap<&'static str, usize>,
    services: BTreeMap<String, usize>,
}

fn connections(pinned: &Pinned) -> anyhow::Result<(Summary, Vec<conntrack::FlowView>)> {
    let labels = pinned.maps().contents()?.service_labels;
    let names: BTreeMap<_, _> =
        labels.into_iter().map(|(id, labels)| (id, labels.name.service.to_string())).collect();
    let list = pinned.conntrack().list()?;
    let mut flows = conntrack::flows(&list, &names, &FlowFilter::default(), Conntrack::now());
    let (mut phases, mut services) = (BTreeMap::new(), BTreeMap::new());
    for flow in &flows {
        *phases.entry(flow.phase()).or_default() += 1;
        *services.entry(flow.service().unwrap_or("gone").to_owned()).or_default() += 1;
    }
    let connections = flows.len();
    flows.truncate(CONNECTIONS);
    Ok((Summary { connections, listed: flows.len(), phases, services }, flows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_are_reported_and_the_others_included() {
        let mut collection = Collection::default();
        collection.add_text("here.txt", Ok("here".to_owned()));
        collection.add_text("gone.txt", Err(anyhow::anyhow!("no such thing")));
        assert_eq!(collection.files, [("here.txt".to_owned(), b"here".to_vec())]);
        assert_eq!(said(&collection.errors), "gone.txt: no such thing\n");
        assert!(
            summary(Path::new("a.tar.gz"), 1, &collection.errors)
                .ends_with("not collected: gone.txt: no such thing\n")
        );
    }
}
