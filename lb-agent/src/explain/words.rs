//! Steps and verdicts as people say them.

use lb_common::{Outcome, Scheduler, conntrack::Phase};

use super::{
    Hook, Question,
    step::{Candidate, ClientSide, Holds, Method, Source, Stale, Step, Unlisted, Verdict, Way},
};

/// The step as a line of text: what was looked at, and what was found.
pub fn step(step: &Step) -> String {
    match step {
        Step::Attached { .. } | Step::LeftToTc | Step::OtherHook | Step::Full => place(step),
        Step::NoRoute | Step::PastStack { .. } => place(step),
        Step::NoPort | Step::NoFlow | Step::Flow { .. } | Step::Anew { .. } | Step::Retransmission => {
            flow(step)
        }
        Step::Foreign | Step::PortTaken { .. } | Step::AcceptsWhatNobodyAsked => flow(step),
        Step::Frontend { .. } | Step::NoFrontend | Step::Torn | Step::Address { .. } => frontend(step),
        Step::IsNotOpened | Step::StrayReset | Step::SocketsOnly | Step::NoBackends { .. } => policy(step),
        Step::Client { .. } | Step::SourceRanges { .. } | Step::Masquerade { .. } => policy(step),
        Step::Affinity { is } => affinity(is),
        Step::Scheduler { scheduler, how, of, table } => scheduled(*scheduler, *how, *of, *table),
        Step::AnotherBackend => {
            "backend: the one it has asked does not answer (--syn-retries): the next one".into()
        }
        Step::NoSuchBackend => {
            "backend: the record leads to slots that BACKENDS has not; this is a bug".into()
        }
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn place(step: &Step) -> String {
    match step {
        Step::Attached { device, at, program: true } => {
            format!("device: {device}, at {at} there is our program")
        }
        Step::Attached { device, at, program: false } => {
            format!("device: {device}, at {at} there is NO program of ours; with it this would follow:")
        }
        Step::LeftToTc => "xdp: left to tc ingress, where this follows:".into(),
        Step::OtherHook => {
            "hook: packets of this flow are translated at the other side of their device, or were already"
                .into()
        }
        Step::NoRoute => "route: there is none to the backend".into(),
        Step::PastStack { device } => format!("route: leaves at once through {device}, past the stack"),
        _ => "conntrack: full".into(),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn flow(step: &Step) -> String {
    match step {
        Step::NoPort => {
            "conntrack: not looked at without a source port (--from ADDR:PORT); a new connection, then".into()
        }
        Step::NoFlow => "conntrack: no entry".into(),
        Step::Flow { reply, to, phase, seconds_left, service, way } => {
            let direction = if *reply { "a backend's answers" } else { "a client's packets" };
            let phase = phase.map_or("its other half is lost", Phase::as_str);
            format!(
                "conntrack: entry for {direction} of {service}, {phase}, {seconds_left} s left: becomes {} -> {}{}",
                to.from,
                to.to,
                travels(*way)
            )
        }
        Step::Anew { why } => format!("conntrack: the packet asks for a new connection, and {}", stale(*why)),
        Step::Retransmission => {
            "conntrack: the packet asks for the connection again, and goes where the first one went".into()
        }
        Step::Foreign => {
            "conntrack: that flow is over, and this accepts a connection that went past the virtual \
            address: not ours"
                .into()
        }
        Step::PortTaken { port } => {
            format!("conntrack: towards that backend source port {port} is another flow's: gets another one")
        }
        _ => "connection: who accepts one has been asked for it past us".into(),
    }
}

const fn travels(way: Way) -> &'static str {
    match way {
        Way::Stack => "",
        Way::Masqueraded => ", masqueraded where it leaves",
        Way::Masquerade => " (this is the masquerading)",
        Way::Hairpin => ", back where it comes from",
        Way::Routed => ", out again past the stack",
        Way::Tunnel => " in a tunnel",
        Way::Direct => ", past the stack as soon as the next hop is known",
    }
}

const fn stale(why: Stale) -> &'static str {
    match why {
        Stale::HalfLost => "the entry has lost its other half: balanced anew",
        Stale::Over => "the last one is over: balanced anew",
        Stale::Unanswered => "the backend did not answer often enough (--syn-retries): balanced anew",
        Stale::BackendGone => "the service has not got that backend any more: balanced anew",
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn frontend(step: &Step) -> String {
    match step {
        Step::Frontend {
            frontend,
            protocol,
            service,
            kind,
            scheduler,
            affinity_seconds,
            backends,
            inside,
        } => {
            let kind = kind.map_or("of an unknown kind", lb_common::FrontendKind::as_str);
            let affinity = match affinity_seconds {
                0 => "no affinity".to_owned(),
                seconds => format!("affinity ClientIP {seconds} s"),
            };
            let backends = match inside {
                Some(inside) => format!(
                    "traffic policy Local: {} for clients outside of the cluster, {inside} for those inside",
                    counted(*backends)
                ),
                None => counted(*backends),
            };
            format!(
                "frontend: {frontend}/{protocol} is {service} ({kind}), scheduler {scheduler}, {affinity}, {backends}"
            )
        }
        Step::NoFrontend => "frontend: no service has this address and port".into(),
        Step::Torn => "frontend: the record is being replaced; ask again".into(),
        Step::Address { is } => format!(
            "address: {}",
            match is {
                Unlisted::OutOfRange => "not one of the cluster IPs: not ours",
                Unlisted::UnknownVip => "in the range of cluster IPs, and no service has it: dropped",
                Unlisted::Unknown =>
                    "in the range of cluster IPs, and no service has it; such packets pass here",
                Unlisted::NoClusterIp => "of the node, or external: other ports are left to whom they belong",
                Unlisted::ClusterIp => "a cluster IP, and no service has this port of it",
            }
        ),
        _ => String::new(),
    }
}

fn counted(backends: u32) -> String {
    if backends == 1 { "1 backend".to_owned() } else { format!("{backends} backends") }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the caller has sorted them")]
fn policy(step: &Step) -> String {
    match step {
        Step::IsNotOpened => {
            "connection: at an address of the node only a packet that opens one is for the service".into()
        }
        Step::StrayReset => "connection: a reset of no flow: there is nobody to reset".into(),
        Step::SocketsOnly => "frontend: for processes of the node only".into(),
        Step::NoBackends { elsewhere: true } => {
            "backends: none on this node, and the traffic policy is Local: dropped".into()
        }
        Step::NoBackends { elsewhere: false } => "backends: none that takes new connections: refused".into(),
        Step::Client { is, backends } => format!(
            "client: {}: {}",
            match is {
                ClientSide::InsideByAddress => "inside the cluster, by its address",
                ClientSide::InsideByDevice => "inside the cluster, by its device",
                ClientSide::Outside => "outside of the cluster",
            },
            counted(*backends)
        ),
        Step::SourceRanges { allowed: true } => "source ranges: the client is in one".into(),
        Step::SourceRanges { allowed: false } => "source ranges: the client is in none: dropped".into(),
        Step::Masquerade { source } => match source {
            Source::Client => "masquerade: no, the backend sees the client's own address".into(),
            Source::ClientOnNode => "masquerade: no, the backend is the node itself: the packet does not leave".into(),
            Source::Node(address) => format!("masquerade: yes, the backend sees {address}"),
            Source::Nobody => {
                "masquerade: yes, but the node has no address or no ports for that yet (no agent has written settings)"
                    .into()
            }
        },
        _ => String::new(),
    }
}

fn affinity(is: &Holds) -> String {
    match is {
        Holds::Nothing => "affinity: nothing is remembered of this client".into(),
        Holds::Expired { backend } => format!("affinity: the client had {backend}, too long ago"),
        Holds::Gone { backend } => {
            format!("affinity: the client had {backend}, which the service has not got any more")
        }
        Holds::Backend { backend, seconds_left } => {
            format!("affinity: the client belongs to {backend}, for {seconds_left} s more")
        }
    }
}

fn scheduled(scheduler: Scheduler, how: Method, of: u32, table: u32) -> String {
    let how = match how {
        Method::Chance => "by chance",
        Method::Turn => "whose turn it is on the CPU that gets the packet",
        Method::Hash => "by hash: always the same one",
        Method::HashOfPort => "by hash, also of the source port, which was not given",
        Method::Load => "the one with the fewest active connections for its weight",
    };
    let table = if table == 0 { String::new() } else { format!(", by a table of {table}") };
    format!("scheduler: {scheduler}, {how}, of {}{table}", counted(of))
}

/// The verdict as lines of text; the first one says what becomes of the packet.
pub fn verdict(verdict: &Verdict, question: &Question) -> Vec<String> {
    match verdict {
        Verdict::Untouched { outcome } => {
            let what = if question.hook == Hook::Socket { "the call goes on" } else { "goes on" };
            vec![format!("{what} as it is ({})", outcome.as_str())]
        }
        Verdict::Translated { outcome, to } => {
            vec![format!("translated to {} -> {} ({})", to.from, to.to, outcome.as_str())]
        }
        Verdict::Begins { backends } => match &backends[..] {
            [only] => vec![format!("to {}", candidate(only))],
            several => {
                let first = format!("to one of {} backends:", several.len());
                let each = several.iter().map(|backend| format!("   {}", candidate(backend)));
                std::iter::once(first).chain(each).collect()
            }
        },
        Verdict::Rejected { outcome } => {
            vec![format!("{} ({})", refused(question, *outcome), outcome.as_str())]
        }
        Verdict::Dropped { outcome } => {
            let what =
                if question.hook == Hook::Socket { "the call fails with EHOSTUNREACH" } else { "dropped" };
            vec![format!("{what} ({})", outcome.as_str())]
        }
    }
}

fn refused(question: &Question, outcome: Outcome) -> &'static str {
    match (question.hook, outcome) {
        (Hook::Socket, _) => "the call fails with ECONNREFUSED",
        (_, Outcome::RejectTcp) => "refused with a RST",
        _ => "refused with ICMP port unreachable",
    }
}

fn candidate(candidate: &Candidate) -> String {
    let pod = candidate.pod.as_ref().map_or_else(String::new, |pod| format!(" ({pod})"));
    format!("{}{pod}{} ({})", candidate.backend, travels(candidate.way), candidate.outcome.as_str())
}
