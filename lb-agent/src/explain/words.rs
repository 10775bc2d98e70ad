//! The text of every step and verdict. The text of a step begins with its topic, such as `conntrack:`.

use std::net::SocketAddr;

use lb_common::{FrontendKind, Outcome, Scheduler};
use lb_ebpf::rules::socket::{self, SocketVerdict};

use crate::announce::{AnnouncedBy, announcer, means};

use super::{
    HookPoint, Question,
    step::{
        AffinityState, Candidate, ClientSide, Conclusion, ForwardingPath, Method, Source, Stale, TraceStep,
        Unlisted,
    },
};

/// The text of a step: the lookup, and its result.
pub fn step(step: &TraceStep) -> String {
    match step {
        TraceStep::Assumed { .. }
        | TraceStep::Attached { .. }
        | TraceStep::LeftToTc
        | TraceStep::OtherHook
        | TraceStep::OfOtherFlow
        | TraceStep::BeginsAtIngress
        | TraceStep::UdpConnectSucceeds => hook(step),
        TraceStep::Announced { .. } => announced(step),
        TraceStep::NoPort
        | TraceStep::NoFlow
        | TraceStep::Flow { .. }
        | TraceStep::PortTaken { .. }
        | TraceStep::NodePortTaken { .. }
        | TraceStep::Full => conntrack(step),
        TraceStep::NewConnection { .. } | TraceStep::Retransmission | TraceStep::Foreign => conntrack(step),
        TraceStep::Frontend { .. } | TraceStep::NoFrontend | TraceStep::Torn | TraceStep::SocketsOnly => {
            frontend(step)
        }
        TraceStep::NodeLocalDns { server, live } => node_local_dns(server, *live),
        TraceStep::Address { is } => address(*is).into(),
        TraceStep::LeftToEarlier
        | TraceStep::NotSyn
        | TraceStep::StrayReset
        | TraceStep::StraySynAck
        | TraceStep::UnknownConnection
        | TraceStep::InvalidFlags => connection(step).into(),
        TraceStep::NoBackends { .. }
        | TraceStep::Client { .. }
        | TraceStep::DeniedSource
        | TraceStep::SourceRanges { .. }
        | TraceStep::Limit { .. } => policy(step),
        TraceStep::Masquerade { source } => masquerade(*source),
        TraceStep::ProxyProtocol | TraceStep::SocketWithoutHeader { .. } => proxy_protocol(step).into(),
        TraceStep::Affinity { is } => affinity(is),
        TraceStep::Scheduler { scheduler, how, of, table } => scheduled(*scheduler, *how, *of, *table),
        TraceStep::NextBackend | TraceStep::NoSuchBackend => backend(step).into(),
        TraceStep::NoRoute | TraceStep::BypassesStack { .. } => route(step),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn announced(step: &TraceStep) -> String {
    match step {
        TraceStep::Announced { address, node: None, by: AnnouncedBy::Bgp, advertisements, .. } => {
            let means = means(AnnouncedBy::Bgp, advertisements);
            format!("announcement: this node does not announce {address} {means}; other nodes may")
        }
        TraceStep::Announced { address, node, here, since, by, advertisements } => {
            let effect = match (node, by) {
                (None, _) | (Some(_), AnnouncedBy::Nothing) => {
                    "so other machines do not find the address by it"
                }
                (Some(_), AnnouncedBy::Layer2) => "so packets from other machines go there",
                (Some(_), AnnouncedBy::Bgp) => "so routers may send packets there",
            };
            let (node, means) = (announcer(node.as_deref(), *here, *since), means(*by, advertisements));
            format!("announcement: {node} announces {address} {means}, {effect}")
        }
        _ => String::new(),
    }
}

fn node_local_dns(server: &SocketAddr, is_live: bool) -> String {
    if is_live {
        format!("node-local DNS: the agent answers pods of this node at {server}")
    } else {
        format!(
            "node-local DNS: the agent at {server} does not answer now, so the endpoints of the Service do"
        )
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
const fn proxy_protocol(step: &TraceStep) -> &'static str {
    match step {
        TraceStep::ProxyProtocol => {
            "proxy protocol: the backend first gets a header, version 2, with the addresses and ports of this packet; \
             the client's sequence numbers are shifted by its length"
        }
        TraceStep::SocketWithoutHeader { refused: false } => {
            "proxy protocol: the system call keeps the cluster IP, and the packets get a backend and a header at the \
             catch device; explain --from an address of this node shows them"
        }
        _ => {
            "proxy protocol: the node's own packets to this address bypass the programs that send the header: the call \
             fails; use the cluster IP"
        }
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
const fn backend(step: &TraceStep) -> &'static str {
    match step {
        TraceStep::NextBackend => {
            "backend: the client's previous backend did not answer (--syn-retries), so the next one is used"
        }
        _ => "backend: the Service's record points outside the BACKENDS map: dropped; this is a bug",
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn route(step: &TraceStep) -> String {
    match step {
        TraceStep::BypassesStack { device } => {
            format!("route: the packet leaves at once through {device}, bypassing the stack")
        }
        _ => "route: the kernel has no route for the translated packet".into(),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn hook(step: &TraceStep) -> String {
    match step {
        TraceStep::Assumed { error } => format!(
            "programs: {error}: the next steps assume the defaults of --maglev-seed, --syn-retries and --forwarding"
        ),
        TraceStep::BeginsAtIngress => {
            "hook: the packet enters the node again through this device, and the program at ingress begins the new \
             connection"
                .into()
        }
        TraceStep::UdpConnectSucceeds => {
            "socket: connect(2) of a UDP socket succeeds; the verdict is about sendto(2)".into()
        }
        TraceStep::Attached { device, at, program: true } => {
            format!("device: a program of lb-agent is attached to {device} at {at}")
        }
        TraceStep::Attached { device, at, program: false } => {
            format!(
                "device: NO program of lb-agent is attached to {device} at {at}; the next steps assume one"
            )
        }
        TraceStep::LeftToTc => {
            "xdp: the XDP program passes the packet on to tc ingress, which decides as follows".into()
        }
        TraceStep::OfOtherFlow => {
            "hook: the entry is that of a connection of the node, which did not send this packet: the packet belongs to \
             another flow with the same source port, and is translated already"
                .into()
        }
        _ => "hook: packets of this flow are not translated here, but at the other tc hook of their device"
            .into(),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn conntrack(step: &TraceStep) -> String {
    match step {
        TraceStep::NoPort => {
            "conntrack: not looked up, because --from names no source port (ADDR:PORT); treated as a new connection"
                .into()
        }
        TraceStep::NoFlow => "conntrack: no entry for these addresses and ports".into(),
        TraceStep::Flow { reply, to, phase, half, seconds_left, service, way } => {
            let sender = if *reply { "a backend" } else { "a client" };
            let (phase, lost) = (phase.as_str(), if *half { ", the other entry is lost" } else { "" });
            format!(
                "conntrack: entry for packets from {sender} of {service}, {phase}{lost}, expires in {seconds_left} s \
                 if idle: sent on as {} -> {}{}",
                to.from,
                to.to,
                travels(*way)
            )
        }
        TraceStep::NewConnection { why } => {
            format!("conntrack: this packet begins a new connection on the old entry, because {}", stale(*why))
        }
        TraceStep::Retransmission => {
            "conntrack: this SYN is a retransmission and goes to the same backend as the first one".into()
        }
        TraceStep::Foreign => {
            "conntrack: SYN-ACK on a flow that has ended: its connection bypassed the virtual address, left untouched"
                .into()
        }
        TraceStep::PortTaken { port } => {
            format!(
                "conntrack: another flow to this backend uses source port {port}, so this flow gets another source port"
            )
        }
        TraceStep::NodePortTaken { port } => {
            format!(
                "conntrack: a flow to the same endpoint has port {port} at this node, so this connection of the node gets \
                 another source port where it leaves"
            )
        }
        _ => "conntrack: the flow table is full".into(),
    }
}

const fn travels(path: ForwardingPath) -> &'static str {
    match path {
        ForwardingPath::Stack => "",
        ForwardingPath::Masqueraded => ", masqueraded where it leaves the node",
        ForwardingPath::Masquerade => " (masquerading flow)",
        ForwardingPath::Hairpin => ", back through the same device (hairpin)",
        ForwardingPath::Caught => ", from the catch device with the virtual address as source",
        ForwardingPath::CaughtAndMasqueraded => {
            ", from the catch device, masqueraded where it leaves the node"
        }
        ForwardingPath::Routed => ", at once through another wire device, bypassing the stack",
        ForwardingPath::Tunnel => " in a tunnel to the backend's node",
        ForwardingPath::Direct => ", bypassing the stack as soon as the next hop is known",
    }
}

const fn stale(why: Stale) -> &'static str {
    match why {
        Stale::HalfLost => "its reverse entry is lost",
        Stale::Over => "the previous connection has ended",
        Stale::Unanswered => "the backend has not answered any SYN so far (limit: --syn-retries)",
        Stale::BackendGone => "the service no longer has that backend, which does not answer",
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn frontend(step: &TraceStep) -> String {
    match step {
        TraceStep::Frontend {
            frontend,
            protocol,
            service,
            kind,
            scheduler,
            affinity_seconds,
            backends,
            internal,
        } => {
            let kind = kind.map_or("of an unknown kind", FrontendKind::as_str);
            let affinity = match affinity_seconds {
                0 => "no affinity".to_owned(),
                seconds => format!("affinity ClientIP {seconds} s"),
            };
            let backends = match internal {
                Some(internal) => format!(
                    "traffic policy Local: {} for external clients, {internal} for internal ones",
                    counted(*backends)
                ),
                None => counted(*backends),
            };
            format!(
                "frontend: {frontend}/{protocol} is {service} ({kind}), scheduler {scheduler}, {affinity}, {backends}"
            )
        }
        TraceStep::NoFrontend => "frontend: no Service has this address and port".into(),
        TraceStep::Torn => "frontend: the agent is replacing this Service's record; run explain again".into(),
        _ => "frontend: only for processes of the node, never for packets".into(),
    }
}

const fn address(is: Unlisted) -> &'static str {
    match is {
        Unlisted::OutOfRange => "address: outside the ranges of cluster IPs: left untouched",
        Unlisted::UnknownVip => "address: in a range of cluster IPs, but no Service has it: dropped",
        Unlisted::Unknown => "address: in a range of cluster IPs, but no Service has it: left untouched",
        Unlisted::NoClusterIp => {
            "address: of the node, of a load balancer, of another proxy's Service, or an external IP: left untouched"
        }
        Unlisted::ClusterIp => "address: a cluster IP, but no Service has this port of it",
    }
}

fn counted(backends: u32) -> String {
    if backends == 1 { "1 backend".to_owned() } else { format!("{backends} backends") }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
const fn connection(step: &TraceStep) -> &'static str {
    match step {
        TraceStep::LeftToEarlier => {
            "handover: an agent of another version is taking over, and the earlier programs, which may know the \
             connection, get this packet next"
        }
        TraceStep::NotSyn => {
            "connection: not a SYN, so at an address of the node it begins no flow; it may be the node's own"
        }
        TraceStep::InvalidFlags => "connection: TCP flags that no TCP sends together: dropped",
        TraceStep::UnknownConnection => {
            "connection: not a SYN and no tracked flow, and the Service has a drain or idle timeout or the PROXY protocol: answered with a RST"
        }
        TraceStep::StrayReset => "connection: RST without a tracked flow to reset: dropped",
        _ => "connection: SYN-ACK of no tracked flow: the connection bypassed this proxy, left untouched",
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn policy(step: &TraceStep) -> String {
    match step {
        TraceStep::NoBackends { elsewhere: true } => {
            "backends: none on this node, and the traffic policy is Local: dropped".into()
        }
        TraceStep::NoBackends { elsewhere: false } => {
            "backends: none accepts new connections: rejected".into()
        }
        TraceStep::Client { is, backends } => format!(
            "client: {}: {}",
            match is {
                ClientSide::InternalByAddress => "internal to the cluster (by its address)",
                ClientSide::InternalByDevice =>
                    "internal to the cluster (by the device that the packet enters through)",
                ClientSide::External => "external to the cluster",
            },
            counted(*backends)
        ),
        TraceStep::DeniedSource => "deny list: --deny-source, or an IPsec policy that replies would bypass, includes the client: dropped".into(),
        TraceStep::Limit { rate, each_client, left } => {
            let of = if *each_client { "of each client" } else { "of all clients together" };
            let left = if *left == 0 { "none may begin now: dropped".into() } else { format!("{left} may begin now") };
            format!("limit: {rate} new connections {of}, on this node: {left}")
        }
        TraceStep::SourceRanges { allowed: true } => {
            "source ranges: loadBalancerSourceRanges include the client".into()
        }
        _ => "source ranges: loadBalancerSourceRanges do not include the client: dropped".into(),
    }
}

fn masquerade(source: Source) -> String {
    match source {
        Source::Client => "masquerade: no, the backend sees the client's own address".into(),
        Source::ClientOnNode => {
            "masquerade: no, the backend has an address of this node, so the packet stays here".into()
        }
        Source::Node(address) => format!("masquerade: yes, the backend sees the node's address {address}"),
        Source::Vip(address) => format!(
            "masquerade: no, but the backend sees the virtual address {address}, so its replies come back through here"
        ),
        Source::Unset => {
            "masquerade: yes, but the agent has not yet set an address or source ports for it: dropped".into()
        }
    }
}

fn affinity(is: &AffinityState) -> String {
    match is {
        AffinityState::Nothing => "affinity: no entry for this client".into(),
        AffinityState::Expired { backend } => {
            format!("affinity: the client was pinned to {backend}, but that has expired")
        }
        AffinityState::Gone { backend } => {
            format!("affinity: the client was pinned to {backend}, which the service no longer has")
        }
        AffinityState::Backend { backend, seconds_left } => {
            format!("affinity: the client is pinned to {backend} for {seconds_left} s more")
        }
    }
}

fn scheduled(scheduler: Scheduler, how: Method, of: u32, table: u32) -> String {
    let how = match how {
        Method::Chance => "at random",
        Method::Turn => "in turn, each CPU by its own sequence",
        Method::Hash => "by hash, always the same one",
        Method::HashOfPort => "by hash of the client's address and port (--from names no port)",
        Method::Load => "the one with the fewest active flows for its weight",
    };
    let table = if table == 0 { String::new() } else { format!(", from a table of {table} entries") };
    format!("scheduler: {scheduler} picks one of {}: {how}{table}", counted(of))
}

/// The lines of the verdict; the first line tells what happens to the packet.
pub fn verdict(verdict: &Conclusion, question: &Question) -> Vec<String> {
    match verdict {
        Conclusion::Untouched { outcome }
        | Conclusion::Rejected { outcome }
        | Conclusion::Dropped { outcome } => {
            let what = if question.hook == HookPoint::Socket { call(*outcome) } else { packet(*outcome) };
            vec![format!("{what} ({})", outcome.as_str())]
        }
        Conclusion::Translated { outcome, ends } => {
            vec![format!("translated to {} -> {} ({})", ends.from, ends.to, outcome.as_str())]
        }
        Conclusion::Begins { backends } => match &backends[..] {
            [only] => vec![format!("sent to {}", candidate(only))],
            several => {
                let first = format!("sent to one of {} backends:", several.len());
                let each = several.iter().map(|backend| format!("   {}", candidate(backend)));
                std::iter::once(first).chain(each).collect()
            }
        },
    }
}

/// The text about a system call that gets no backend: whether it goes on, or its error.
const fn call(outcome: Outcome) -> &'static str {
    match socket::verdict(outcome) {
        SocketVerdict::Continue => "the call goes on unchanged",
        SocketVerdict::ConnectionRefused => "the call fails with ECONNREFUSED",
        SocketVerdict::HostUnreachable => "the call fails with EHOSTUNREACH",
    }
}

/// The text about a packet that is not translated: whether it is left untouched, dropped, held or rejected.
fn packet(outcome: Outcome) -> &'static str {
    match outcome.verdict() {
        lb_common::Verdict::Pass => "left untouched",
        lb_common::Verdict::Drop => "dropped",
        lb_common::Verdict::Hold => "held until the first fragment arrives",
        _ if outcome == Outcome::RejectTcp => "rejected with a TCP RST",
        lb_common::Verdict::Bounce | lb_common::Verdict::Route => "rejected with ICMP port unreachable",
    }
}

fn candidate(candidate: &Candidate) -> String {
    let pod = candidate.pod.as_ref().map_or_else(String::new, |pod| format!(" ({pod})"));
    format!("{}{pod}{} ({})", candidate.backend, travels(candidate.way), candidate.outcome.as_str())
}
