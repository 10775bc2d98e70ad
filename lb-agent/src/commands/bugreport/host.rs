//! Facts about the node for a bug report: network, leftovers of kube-proxy, kernel, location of the agent's log.

use std::{
    fs,
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::json;

use super::Collection;
use crate::leftovers::{self, Findings};
use lb_datapath::Routes;

/// Time limit of each program that [`run`] starts.
const PATIENCE: Duration = Duration::from_secs(10);
/// Search path of the programs that [`run`] starts: they do not inherit the environment.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Files of the archive about the network, each with the command line whose output it holds.
const NETWORK: [(&str, &[&str]); 9] = [
    ("net/links.json", &["ip", "-j", "-d", "-s", "link", "show"]),
    ("net/addresses.json", &["ip", "-j", "address", "show"]),
    ("net/routes.json", &["ip", "-j", "-4", "route", "show", "table", "all"]),
    ("net/routes6.json", &["ip", "-j", "-6", "route", "show", "table", "all"]),
    ("net/rules.json", &["ip", "-j", "-4", "rule", "show"]),
    ("net/rules6.json", &["ip", "-j", "-6", "rule", "show"]),
    ("net/neighbours.json", &["ip", "-j", "neighbour", "show"]),
    ("net/qdiscs.json", &["tc", "-j", "-s", "qdisc", "show"]),
    ("net/bpf-net.json", &["bpftool", "-j", "net", "show"]),
];

const SYSCTLS: [&str; 10] = [
    "kernel/unprivileged_bpf_disabled",
    "net/core/bpf_jit_enable",
    "net/core/bpf_jit_harden",
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/forwarding",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/conf/default/rp_filter",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/ip_local_reserved_ports",
    "net/ipv6/conf/all/forwarding",
];

pub(super) fn collect(collection: &mut Collection) {
    for (name, command) in NETWORK {
        collection.add(name, run(command));
    }
    collection.add("net/filters.jsonl", filters());
    collection.add_text("kube-proxy.txt", Ok(kube_proxy()));
    collection.add_text("kernel.txt", kernel());
    collection.add_text("kernel-config.txt", kernel_config());
}

/// tc filters on both sides of the interfaces of this network namespace.
fn filters() -> anyhow::Result<Vec<u8>> {
    let mut text = String::new();
    for device in Routes::open()?.names() {
        for side in ["ingress", "egress"] {
            // The interface may have disappeared since `names` listed it, for example with its pod.
            let (name, value) = match run(&["tc", "-j", "filter", "show", "dev", device, side]) {
                Ok(found) => ("filters", or_none(&String::from_utf8_lossy(&found)).to_owned()),
                Err(error) => ("error", json!(format!("{error:#}")).to_string()),
            };
            let device = json!(device);
            text.push_str(&format!("{{\"device\":{device},\"side\":\"{side}\",\"{name}\":{value}}}\n"));
        }
    }
    Ok(text.into_bytes())
}

fn or_none(json: &str) -> &str {
    if json.trim().is_empty() { "[]" } else { json.trim() }
}

/// Descriptions of kube-proxy's leftovers, without the rules themselves.
fn kube_proxy() -> String {
    let Findings { leftovers, errors } = leftovers::find();
    if leftovers.is_empty() && errors.is_empty() {
        return "kube-proxy has left nothing that iptables-save, nft or ip list.\n".to_owned();
    }
    let found = leftovers.iter().map(|leftover| format!("{leftover}\n"));
    found.chain(errors.iter().map(|error| format!("{error}\n"))).collect()
}

fn kernel() -> anyhow::Result<String> {
    let mut text = fs::read_to_string("/proc/version").context("cannot read /proc/version")?;
    for name in SYSCTLS {
        let value = fs::read_to_string(format!("/proc/sys/{name}"));
        let value = value.map_or_else(|error| error.to_string(), |value| value.trim().to_owned());
        text.push_str(&format!("{} = {value}\n", name.replace('/', ".")));
    }
    Ok(text)
}

/// Options of the kernel configuration that concern BPF and networking.
fn kernel_config() -> anyhow::Result<String> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let config = config_of_running_kernel()
        .or_else(|| fs::read_to_string(format!("/boot/config-{}", release.trim())).ok())
        .context("neither /proc/config.gz nor /boot/config-RELEASE can be read")?;
    let matters = |line: &&str| {
        ["BPF", "XDP", "CGROUP", "NET_CLS", "NET_SCH_INGRESS", "INET_DIAG", "VETH", "IP_VS", "NF_CONNTRACK"]
            .iter()
            .any(|word| line.contains(word))
    };
    Ok(config.lines().filter(matters).map(|line| format!("{line}\n")).collect())
}

fn config_of_running_kernel() -> Option<String> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(fs::File::open("/proc/config.gz").ok()?).read_to_string(&mut text).ok()?;
    Some(text)
}

/// A text that says where the agent's log is. `holder` is the process that holds the data plane, as text such as
/// `pid 17 lb-agent`.
pub(super) fn log_location(holder: Option<&str>) -> String {
    let pid = holder.and_then(|holder| holder.split(' ').nth(1)).and_then(|pid| pid.parse::<u32>().ok());
    let Some(pid) = pid else {
        return "No agent runs. Its log is the standard error of its process: `journalctl -u UNIT`, `kubectl logs`, or a file.\n"
            .to_owned();
    };
    let target = fs::read_link(format!("/proc/{pid}/fd/2"));
    let target = target.map_or_else(|error| error.to_string(), |path| path.display().to_string());
    let group =
        fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_else(|error| format!("{error}\n"));
    format!(
        "The agent (pid {pid}) logs to {target}.\nIf that is a socket or pipe, its unit or container has the log \
         (`journalctl`, `kubectl logs`); its control groups are:\n{group}"
    )
}

/// Runs a program, and returns its output if it succeeds within [`PATIENCE`]. The environment of the program contains
/// only a search path.
fn run(command: &[&str]) -> anyhow::Result<Vec<u8>> {
    let [program, arguments @ ..] = command else { bail!("there is no program") };
    let said = || format!("cannot run `{}`", command.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(said)?;
    let mut pipe = child.stdout.take().with_context(said)?;
    let reader = thread::spawn(move || {
        let mut output = Vec::new();
        pipe.read_to_end(&mut output).map(|_| output)
    });
    let end = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(said)? {
            break status;
        }
        if Instant::now() > end {
            child.kill().with_context(said)?;
            child.wait().with_context(said)?;
            bail!("`{}` takes longer than {PATIENCE:?}", command.join(" "));
        }
        thread::sleep(Duration::from_millis(10));
    };
    if !status.success() {
        bail!("`{}` failed: {status}", command.join(" "));
    }
    match reader.join() {
        Ok(output) => output.with_context(said),
        Err(_) => bail!("cannot read what `{}` prints", command.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_no_environment() {
        let output = run(&["env"]).unwrap();
        assert_eq!(String::from_utf8(output).unwrap().trim(), format!("PATH={PATH}"));
    }

    #[test]
    fn failing_command_is_reported() {
        assert!(format!("{:#}", run(&["lb-no-such-program"]).unwrap_err()).contains("lb-no-such-program"));
        assert!(run(&["false"]).unwrap_err().to_string().contains("`false` failed"));
    }

    #[test]
    fn log_location_names_the_target_of_stderr() {
        let holder = format!("pid {} lb-agent", std::process::id());
        assert!(
            log_location(Some(&holder)).contains("logs to /") || log_location(Some(&holder)).contains(':')
        );
        assert!(log_location(None).starts_with("No agent runs"));
    }
}
