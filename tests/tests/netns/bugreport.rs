//! Tests of `lb-agent bugreport`: what the archive contains, and that it contains no secrets.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use lb_tests::{
    agent::{self, Agent},
    client::ask_http,
    cluster::ClientLink,
};
use nix::mount::{MsFlags, mount};
use serde_json::Value;

use crate::bed::{Bed, WEB, http};

/// Texts on the node that must not be in an archive.
const SECRETS: [&str; 5] = [
    "secret-of-the-agents-environment",
    "secret-of-the-commands-environment",
    "secret-token-of-the-kubeconfig",
    "secret-beside-the-configuration",
    "secret-in-a-manifest",
];

/// Unpacks an archive; returns its files by their names.
fn unpacked(archive: &Path, to: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::create_dir(to).unwrap();
    agent::run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(to).arg("--strip-components=1"))
        .unwrap();
    let mut files = BTreeMap::new();
    let mut folders = vec![to.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(to).unwrap().display().to_string();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

fn json(files: &BTreeMap<String, Vec<u8>>, name: &str) -> Value {
    let bytes = files.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", files.keys()));
    serde_json::from_slice(bytes).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A node with an agent. The agent's environment, a kubeconfig, the configuration file and the manifests each contain
/// a secret.
fn with_secrets() -> (Bed, PathBuf) {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let mut settings = bed.cluster.agent_settings(1);
    let folder = bed.cluster.folder().to_owned();
    let kubeconfig = folder.join("kubeconfig");
    fs::write(&kubeconfig, format!("users: [{{name: a, user: {{token: {}}}}}]\n", SECRETS[2])).unwrap();
    let config = folder.join("config.yaml");
    fs::write(&config, format!("# {}\nlog-level: info\n", SECRETS[3])).unwrap();
    let secret =
        format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\nstringData: {{a: {}}}\n", SECRETS[4]);
    fs::write(settings.manifests.join("secret.yaml"), secret).unwrap();
    settings.arguments.extend(["--config".to_owned(), config.display().to_string()]);
    let starter = ["env".to_owned(), format!("LB_TEST_TOKEN={}", SECRETS[0])];
    let agent = Agent::spawn_by(&bed.cluster.node1, settings, &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    bed.agent = Some(agent);
    (bed, kubeconfig)
}

fn report(bed: &Bed, kubeconfig: &Path, to: &Path) -> anyhow::Result<String> {
    let settings = bed.cluster.agent_settings(1);
    let mut command = bed.cluster.node1.command(agent::binary());
    command.arg("bugreport").arg("--output").arg(to).arg("--bpffs").arg(&settings.bpffs);
    command
        .env("LB_TEST_TOKEN", SECRETS[1])
        .env("KUBECONFIG", kubeconfig)
        .env("LB_AGENT_KUBECONFIG", kubeconfig);
    Ok(String::from_utf8(agent::run(&mut command)?.stdout)?)
}

#[test]
fn bug_report_contains_diagnostics_and_no_secrets() {
    let (mut bed, kubeconfig) = with_secrets();
    ask_http(&bed.cluster.client, http(WEB[0])).unwrap();
    let archive = bed.cluster.folder().join("report.tar.gz");
    let said = report(&bed, &kubeconfig, &archive).unwrap();
    assert!(said.starts_with("Wrote "), "{said}");
    assert_eq!(fs::metadata(&archive).unwrap().permissions().mode() & 0o777, 0o600);
    let files = unpacked(&archive, &bed.cluster.folder().join("unpacked"));
    for (name, bytes) in &files {
        for secret in SECRETS {
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{secret} is in {name}");
        }
    }
    assert_eq!(json(&files, "status.json")["agent"]["running"], true);
    assert_eq!(json(&files, "services.json")[0]["name"], "web");
    assert!(json(&files, "conntrack-summary.json")["connections"].as_u64().unwrap() > 0);
    assert!(json(&files, "config.json").is_object());
    let bpf = json(&files, "bpf.json");
    let has =
        |what: &str, name: &str| bpf[what].as_array().unwrap().iter().any(|object| object["name"] == name);
    assert!(has("programs", "tc_ingress") && has("maps", "CONNTRACK"), "{bpf:#}");
    assert!(!bpf["links"].as_array().unwrap().is_empty());
    assert!(json(&files, "profile.json")["programs"].is_array());
    assert!(json(&files, "net/links.json").is_array() && json(&files, "net/routes.json").is_array());
    let filters = String::from_utf8_lossy(&files["net/filters.jsonl"]);
    assert!(filters.contains("\"device\":\"eth0\",\"side\":\"egress\""), "{filters}");
    let text = |name: &str| String::from_utf8(files[name].clone()).unwrap();
    assert!(text("metrics.txt").contains("lb_packets_total"));
    assert!(text("flags.txt").contains("manifests"));
    assert!(text("log.txt").contains("logs to /"), "{}", text("log.txt"));
    assert!(text("kernel.txt").contains("net.ipv4.ip_forward = 1"));
    assert!(text("kube-proxy.txt").contains("kube-proxy has left nothing"));
    for error in text("errors.txt").lines() {
        let known = ["Everything was collected", "net/bpf-net.json", "kernel-config.txt"];
        assert!(known.iter().any(|start| error.starts_with(start)), "not collected: {error}");
    }

    // Without an agent, the archive lists the files that could not be collected.
    bed.agent.take().unwrap().kill().unwrap();
    let archive = bed.cluster.folder().join("later.tar.gz");
    let said = report(&bed, &kubeconfig, &archive).unwrap();
    assert!(said.contains("not collected: metrics.txt: cannot ask the agent"), "{said}");
    let files = unpacked(&archive, &bed.cluster.folder().join("unpacked-later"));
    assert!(String::from_utf8_lossy(&files["errors.txt"]).contains("config.json: "));
    assert_eq!(json(&files, "services.json")[0]["name"], "web");
}

#[test]
fn bug_report_that_does_not_fit_on_the_disk_leaves_no_file() {
    let (bed, kubeconfig) = with_secrets();
    let small = bed.cluster.folder().join("small");
    fs::create_dir(&small).unwrap();
    let size = Some("size=4k");
    mount(Some("none"), &small, Some("tmpfs"), MsFlags::empty(), size).unwrap();
    let archive = small.join("report.tar.gz");
    let error = report(&bed, &kubeconfig, &archive).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot write {}: No space left", archive.display())), "{error}");
    assert!(!archive.exists());
}
