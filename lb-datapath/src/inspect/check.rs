//! Checks whether this kernel and machine can run the data plane: each probe tries a feature, or reads a setting.

use std::{collections::BTreeSet, fs, io, net::IpAddr, ops::RangeInclusive, path::Path};

use aya::{maps::MapType, sys::is_map_supported, util::KernelVersion};
use lb_common::Settings;
use lb_core::listing::first_few;

use crate::{
    attach::xdp,
    bpf::{bpffs, loader, options::AttachMode, probe, sys},
    error::DatapathError,
    inspect::pinned::Pinned,
    net::{
        devices::{Device, DeviceKind, DevicePatterns, classify},
        network::{Link, Network},
        ports::{self, DEFAULT_MASQUERADE_PORTS},
        xfrm::{self, OutPolicy},
    },
    state::node_sockets,
};

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeResult {
    /// The feature works, or the setting is right.
    Ok,
    /// The data plane runs without the feature, but perhaps slower or not for all packets. Also the result if the probe
    /// of an optional feature could not find out whether the feature works.
    Degraded,
    /// The data plane cannot run: a required feature is missing, or this process lacks the rights to try it.
    Missing,
}

impl ProbeResult {
    /// The result's name in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Missing => "missing",
        }
    }
}

/// One feature of the kernel or setting of the machine that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Name of the feature or setting.
    pub name: &'static str,
    /// Whether the feature works, and whether it is required.
    pub result: ProbeResult,
    /// What the probe found, such as a version or an error.
    pub detail: String,
    /// What the administrator can do; may be empty.
    pub advice: &'static str,
}

impl Probe {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, result: ProbeResult::Ok, detail: detail.into(), advice: "" }
    }

    fn degraded(name: &'static str, detail: impl Into<String>, advice: &'static str) -> Self {
        Self { name, result: ProbeResult::Degraded, detail: detail.into(), advice }
    }

    fn missing(name: &'static str, detail: impl Into<String>, advice: &'static str) -> Self {
        Self { name, result: ProbeResult::Missing, detail: detail.into(), advice }
    }
}

/// The basic map types that the object uses. (Loading the programs, in [`programs`], creates maps of all types.)
const MAP_TYPES: [(MapType, &str); 5] = [
    (MapType::Hash, "hash"),
    (MapType::LruHash, "LRU hash"),
    (MapType::Array, "array"),
    (MapType::PerCpuArray, "per-CPU array"),
    (MapType::RingBuf, "ring buffer"),
];

/// Runs all probes. None of them leaves a change in the kernel.
pub fn check(bpffs: &Path) -> Vec<Probe> {
    vec![
        kernel(),
        maps(),
        programs(),
        xdp_programs(),
        tcx(),
        routes(),
        batches(),
        btf(),
        bpffs_probe(bpffs),
        cgroup2(),
        socket_destruction(),
        forwarding("IPv4 forwarding", true, "sysctl -w net.ipv4.ip_forward=1"),
        forwarding("IPv6 forwarding", false, "sysctl -w net.ipv6.conf.all.forwarding=1"),
        masquerade_ports(bpffs),
        ipsec(bpffs),
        devices(),
    ]
}

/// Runs the cheap probes of [`check`], and returns those whose result is not [`ProbeResult::Ok`]: optional features
/// that are missing, and settings of the host that harm the data plane.
pub fn degraded(bpffs: &Path) -> Vec<Probe> {
    let probes = [tcx(), routes(), batches(), btf(), socket_destruction(), ipsec(bpffs)];
    probes.into_iter().filter(|probe| probe.result != ProbeResult::Ok).collect()
}

fn kernel() -> Probe {
    const NAME: &str = "kernel";
    const FILE: &str = "/proc/sys/kernel/osrelease";
    let detail = match fs::read_to_string(FILE) {
        Ok(release) => format!("Linux {}", release.trim()),
        Err(error) => format!("Linux of unknown release, because {FILE} cannot be read ({error})"),
    };
    match KernelVersion::current() {
        Ok(version) if version >= KernelVersion::new(6, 1, 0) => Probe::ok(NAME, detail),
        Ok(_) => Probe::degraded(NAME, detail, "kernels older than 6.1 are not tested; use a newer one"),
        Err(error) => Probe::degraded(NAME, format!("{detail}: {error}"), "rely on the other probes"),
    }
}

fn maps() -> Probe {
    const NAME: &str = "BPF maps";
    const ADVICE: &str = "run as root or with CAP_BPF and CAP_NET_ADMIN, on a kernel with CONFIG_BPF_SYSCALL";
    for (kind, name) in MAP_TYPES {
        match is_map_supported(kind) {
            Ok(true) => {}
            Ok(false) => return Probe::missing(NAME, format!("the kernel has no {name} maps"), ADVICE),
            Err(error) => {
                return Probe::missing(NAME, format!("cannot create a {name} map: {error}"), ADVICE);
            }
        }
    }
    Probe::ok(NAME, MAP_TYPES.map(|(_, name)| name).join(", "))
}

fn programs() -> Probe {
    const NAME: &str = "BPF programs";
    match loader::try_load() {
        Ok(()) => Probe::ok(NAME, "the kernel accepts all programs of this version"),
        Err(error) => Probe::missing(
            NAME,
            error.to_string(),
            "needs CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CONFIG_NET_CLS_ACT",
        ),
    }
}

fn xdp_programs() -> Probe {
    const NAME: &str = "XDP programs";
    match loader::try_load_xdp() {
        Ok(()) => Probe::ok(NAME, "the kernel accepts them"),
        Err(error) => Probe::degraded(
            NAME,
            format!("{error}: even with --xdp, tc serves all packets"),
            "no action is needed, unless this node should use --xdp",
        ),
    }
}

fn routes() -> Probe {
    const NAME: &str = "routes for programs";
    const ADVICE: &str =
        "no action is needed on a node with one address in each family; Linux 6.7 and newer have it";
    match probe::takes_route_flags(probe::SOURCE).and_then(|source| {
        let neighbour = probe::takes_route_flags(probe::SKIP_NEIGHBOUR)?;
        Ok((source, neighbour))
    }) {
        Ok((true, true)) => Probe::ok(NAME, "with the node's source address"),
        Ok((source, neighbour)) => {
            let lost =
                [(source, "source address"), (neighbour, "route to a neighbour that is not resolved yet")];
            let lost = lost.iter().filter(|(there, _)| !there).map(|(_, what)| *what).collect::<Vec<_>>();
            let detail = format!(
                "without {}: masqueraded packets have the node's primary address, not that of their route",
                lost.join(" and ")
            );
            Probe::degraded(NAME, detail, ADVICE)
        }
        Err(error) => Probe::degraded(NAME, format!("cannot run a program: {error}"), "run as root"),
    }
}

fn tcx() -> Probe {
    const NAME: &str = "tcx";
    match AttachMode::probe() {
        Ok(AttachMode::Tcx) => Probe::ok(NAME, "programs are attached by tcx links"),
        Ok(AttachMode::Clsact) => Probe::degraded(
            NAME,
            "the kernel has no tcx: programs are attached as clsact filters",
            "no action is needed; kernel 6.6 and newer have tcx",
        ),
        Err(error) => Probe::missing(NAME, error.to_string(), "run as root or with CAP_NET_ADMIN"),
    }
}

fn batches() -> Probe {
    const NAME: &str = "batch commands";
    match sys::has_batches() {
        Ok(true) => Probe::ok(NAME, "maps are written in batches"),
        Ok(false) => Probe::degraded(
            NAME,
            "each element of a map takes a system call",
            "no action is needed; kernel 5.6 and newer have batches",
        ),
        Err(error) => Probe::missing(NAME, error.to_string(), "run as root or with CAP_BPF"),
    }
}

fn btf() -> Probe {
    const NAME: &str = "BTF";
    const FILE: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(FILE).exists() {
        Probe::ok(NAME, FILE)
    } else {
        let advice = "a kernel with CONFIG_DEBUG_INFO_BTF lets bpftool show the maps with names";
        Probe::degraded(NAME, format!("there is no {FILE}"), advice)
    }
}

fn bpffs_probe(path: &Path) -> Probe {
    const NAME: &str = "BPF file system";
    let shown = path.display();
    match bpffs::is_bpffs(path) {
        Ok(true) => Probe::ok(NAME, format!("mounted at {shown}")),
        Ok(false) => Probe::degraded(
            NAME,
            format!("not mounted at {shown}"),
            "the agent mounts it; in a container mount the host's with bidirectional propagation",
        ),
        Err(error) => Probe::degraded(NAME, error.to_string(), "the agent creates and mounts it"),
    }
}

fn cgroup2() -> Probe {
    const NAME: &str = "cgroup v2";
    const FILE: &str = "/proc/thread-self/mountinfo";
    let mounts = match fs::read_to_string(FILE) {
        Ok(mounts) => mounts,
        Err(error) => return Probe::degraded(NAME, format!("cannot read {FILE}: {error}"), "mount /proc"),
    };
    match bpffs::mount_of_kind(&mounts, "cgroup2") {
        Some(point) => Probe::ok(NAME, format!("mounted at {point}")),
        None => Probe::degraded(
            NAME,
            "not mounted",
            "mount -t cgroup2 none /sys/fs/cgroup/unified, for socket load balancing",
        ),
    }
}

fn socket_destruction() -> Probe {
    const NAME: &str = "socket destruction";
    match node_sockets::try_destroy() {
        Ok(()) => Probe::ok(NAME, "sockets of backends that are gone get an error"),
        Err(error) => Probe::degraded(
            NAME,
            format!(
                "{error}: UDP sockets of the node keep backends that are gone, and timeouts do not end its TCP connections"
            ),
            "a kernel with CONFIG_INET_UDP_DIAG, CONFIG_INET_TCP_DIAG and CONFIG_INET_DIAG_DESTROY, and CAP_NET_ADMIN",
        ),
    }
}

fn forwarding(name: &'static str, ipv4: bool, advice: &'static str) -> Probe {
    match forwards(ipv4) {
        Ok(true) => Probe::ok(name, "on"),
        Ok(false) => Probe::degraded(name, "off: packets for pods are not routed", advice),
        Err(error) => Probe::degraded(name, error.to_string(), "this kernel may lack the family"),
    }
}

/// Whether this thread's network namespace forwards packets of one IP family.
pub fn forwards(ipv4: bool) -> io::Result<bool> {
    let file = if ipv4 { "/proc/sys/net/ipv4/ip_forward" } else { "/proc/sys/net/ipv6/conf/all/forwarding" };
    let value = fs::read_to_string(file)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {file}: {error}")))?;
    Ok(value.trim() != "0")
}

/// Advice if the pinned maps cannot be read.
const UNREADABLE: &str = "run it as root; if it is, `lb-agent status` says what is missing";

fn masquerade_ports(bpffs: &Path) -> Probe {
    const NAME: &str = "masquerade ports";
    const ADVICE: &str = "the agent adds them to net.ipv4.ip_local_reserved_ports when it starts; \
                          other ports can be given by --masquerade-ports";
    let ports = match masquerade_range(bpffs) {
        Ok(ports) => ports,
        Err(error) => {
            return Probe::degraded(NAME, format!("cannot tell which they are: {error}"), UNREADABLE);
        }
    };
    let (first, last) = (ports.start(), ports.end());
    match ports::is_exposed(&ports) {
        Ok(false) => Probe::ok(NAME, format!("{first}-{last}, reserved")),
        Ok(true) => Probe::degraded(NAME, format!("sockets may get ports of {first}-{last}"), ADVICE),
        Err(error) => Probe::degraded(NAME, error.to_string(), "mount /proc"),
    }
}

/// Source ports for masqueraded packets, from the pinned settings. Without a data plane, the range that a new agent
/// would use by default.
fn masquerade_range(bpffs: &Path) -> Result<RangeInclusive<u16>, DatapathError> {
    let Some(pinned) = Pinned::find(bpffs)? else { return Ok(DEFAULT_MASQUERADE_PORTS) };
    Ok(match pinned.settings()? {
        Settings { first_port, ports, .. } if ports > 0 => first_port..=first_port.saturating_add(ports - 1),
        _ => DEFAULT_MASQUERADE_PORTS,
    })
}

/// Looks for xfrm policies whose source network (except `0.0.0.0/0` and `::/0`) contains a virtual address. Replies
/// from that address bypass the policy, because the kernel looks up policies before a program replaces the endpoint's
/// address, the source of the reply.
fn ipsec(bpffs: &Path) -> Probe {
    ipsec_probe(
        xfrm::out_policies().and_then(|policies| xfrm::bypassed(policies, || pinned_addresses(bpffs))),
    )
}

/// The virtual addresses of the pinned data plane; empty if no data plane is pinned.
fn pinned_addresses(bpffs: &Path) -> Result<BTreeSet<IpAddr>, DatapathError> {
    Pinned::find(bpffs)?.map_or_else(|| Ok(BTreeSet::new()), |pinned| pinned.virtual_addresses())
}

/// The result of the probe [`ipsec`]. `found` has the bypassed policies, each with the virtual addresses from which
/// replies bypass the policy.
fn ipsec_probe(found: Result<Vec<(OutPolicy, Vec<IpAddr>)>, DatapathError>) -> Probe {
    const NAME: &str = "IPsec policies";
    const ADVICE: &str = "replies from these addresses would leave unencrypted, so a running agent denies Services to external clients \
                          in `dst`: give the policy the networks of the endpoints, and do not reach these addresses through \
                          the tunnel";
    match found {
        Ok(policies) if policies.is_empty() => Probe::ok(NAME, "none for the address of a Service"),
        Ok(policies) => {
            let line = |(policy, vips): &(OutPolicy, Vec<IpAddr>)| {
                format!("{policy}: {}", first_few(vips.iter().map(ToString::to_string), 1))
            };
            Probe::degraded(NAME, policies.iter().map(line).collect::<Vec<_>>().join("\n"), ADVICE)
        }
        Err(error) => {
            let detail = format!("cannot tell whether there is one for the address of a Service: {error}");
            Probe::degraded(NAME, detail, UNREADABLE)
        }
    }
}

/// Name of the probe [`devices`].
const DEVICES: &str = "devices";

/// Checks for devices whose clients reach no Service, and for wire devices that `--xdp native` would leave to tc.
/// Selects devices as an agent without `--wire-device` does, because the pinned data plane does not record the agent's
/// flags.
fn devices() -> Probe {
    match Network::read() {
        Ok(Network { links, .. }) => {
            let devices = classify(&links, &DevicePatterns::default());
            devices_probe(&links, &devices, &xdp::left_to_tc(&devices))
        }
        Err(error) => Probe::degraded(DEVICES, format!("cannot list devices: {error}"), "run it as root"),
    }
}

/// The result of the probe [`devices`]: `links` are all devices, `devices` are those that get programs, and
/// `left_to_tc` has the reasons why `--xdp native` would leave some wire devices to tc. These reasons do not degrade
/// the result: `--xdp` is off by default, and a running agent reports them in `status`.
fn devices_probe(links: &[Link], devices: &[Device], left_to_tc: &[DatapathError]) -> Probe {
    const ADVICE: &str = "see docs/limits.md, \"Devices\"";
    let unserved: Vec<String> = links.iter().filter_map(Link::unserved).collect();
    let left: Vec<String> = left_to_tc.iter().map(|why| format!("with --xdp native: {why}")).collect();
    if !unserved.is_empty() {
        return Probe::degraded(DEVICES, [unserved, left].concat().join("\n"), ADVICE);
    }
    let wires = devices.iter().filter(|device| device.kind == DeviceKind::Wire);
    let wires: Vec<&str> = wires.map(|device| device.name.as_str()).collect();
    let wires = if wires.is_empty() { "no wires".to_owned() } else { format!("wires {}", wires.join(", ")) };
    let advice = if left.is_empty() { "" } else { ADVICE };
    Probe { advice, ..Probe::ok(DEVICES, [vec![wires], left].concat().join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::network::LinkAddress;

    fn link(name: &str, hardware: u16) -> Link {
        let address =
            LinkAddress { ip: IpAddr::from([192, 0, 2, 1]), prefix: 24, global: true, secondary: false };
        Link { name: name.to_owned(), hardware, up: true, addresses: vec![address], ..Link::default() }
    }

    fn probe_of(links: &[Link], left_to_tc: &[DatapathError]) -> Probe {
        devices_probe(links, &classify(links, &DevicePatterns::default()), left_to_tc)
    }

    #[test]
    fn devices_probe_names_devices_without_programs_and_veths_that_lose_frames() {
        const INFINIBAND: u16 = 32;
        let lossy = [DatapathError::NoWayOut { device: "eth0".to_owned() }];
        assert_eq!(
            probe_of(&[link("eth0", 1), link("eth1", 1)], &[]),
            Probe::ok("devices", "wires eth0, eth1")
        );
        assert_eq!(probe_of(&[], &[]), Probe::ok("devices", "no wires"));

        let with_veth = probe_of(&[link("eth0", 1)], &lossy);
        assert_eq!(with_veth.result, ProbeResult::Ok, "--xdp is off by default");
        assert!(
            with_veth.detail.starts_with("wires eth0; with --xdp native: veth eth0 loses the frames")
                && with_veth.advice.contains("Devices"),
            "{with_veth:?}"
        );

        let both = probe_of(&[link("eth0", 1), link("ib0", INFINIBAND)], &lossy);
        assert_eq!(both.result, ProbeResult::Degraded);
        let lines: Vec<&str> = both.detail.lines().collect();
        assert!(
            matches!(&lines[..], [ib, veth] if ib.contains("device ib0 gets no programs") && veth.contains("eth0")),
            "{lines:?}"
        );
    }

    /// The test runs probes first without a data plane, then with a folder of pins that has no map, then with a folder
    /// that has only one map.
    #[test]
    fn data_plane_that_cannot_be_read_degrades_the_probes_that_need_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(masquerade_range(folder.path()).unwrap(), DEFAULT_MASQUERADE_PORTS, "there is none");
        let pins = folder.path().join(format!("lb/v{}", lb_common::LAYOUT_VERSION));
        fs::create_dir_all(&pins).unwrap();
        assert_eq!(masquerade_range(folder.path()).unwrap(), DEFAULT_MASQUERADE_PORTS, "it has no map");
        fs::write(pins.join("VIPS"), "").unwrap();
        let ports = masquerade_ports(folder.path());
        assert_eq!(ports.result, ProbeResult::Degraded);
        assert!(ports.detail.starts_with("cannot tell which they are: "), "{ports:?}");

        let source = (IpAddr::from([10, 96, 0, 0]), 12);
        let policy = vec![OutPolicy { source, destination: (IpAddr::from([203, 0, 113, 0]), 24) }];
        let vips = || pinned_addresses(folder.path());
        let ipsec = ipsec_probe(xfrm::bypassed(policy, vips));
        assert_eq!(ipsec.result, ProbeResult::Degraded);
        assert!(ipsec.detail.starts_with("cannot tell whether"), "{ipsec:?}");
        assert_eq!(
            ipsec_probe(xfrm::bypassed(Vec::new(), vips)).result,
            ProbeResult::Ok,
            "no policy, so none is bypassed"
        );
    }
}
