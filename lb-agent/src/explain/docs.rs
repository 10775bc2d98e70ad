//! The section of the documentation that explains each step and verdict, as a path on the server of `lb-agent web`.

use crate::announce::AnnouncedBy;

use super::step::{Conclusion, ForwardingPath, TraceStep, Unlisted};

/// Lists sections of the documentation with their paths.
macro_rules! sections {
    ($($name:ident $path:literal,)*) => {
        /// A section of the documentation, or a row of a table in it.
        #[derive(Clone, Copy, Debug)]
        enum Section { $($name,)* }

        impl Section {
            /// All sections.
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)*];

            const fn path(self) -> &'static str {
                match self { $(Self::$name => $path,)* }
            }
        }
    };
}

sections! {
    Hooks "/docs/datapath#the-data-path",
    Stack "/docs/datapath#through-the-stack",
    Masquerading "/docs/datapath#masqueraded-through-the-stack",
    CatchDevice "/docs/datapath#the-catch-device",
    Routed "/docs/datapath#xdp-routed-flows",
    Direct "/docs/datapath#forwarding-direct",
    NextHops "/docs/datapath#next-hops",
    Tunnels "/docs/datapath#tunnels-dsr",
    Sockets "/docs/datapath#sockets",
    Hairpin "/docs/datapath#hairpin",
    SynOnEntry "/docs/datapath#syn-on-an-existing-entry",
    BypassesVip "/docs/datapath#direct-connection-from-a-port-that-a-vips-connection-used-before",
    PortTaken "/docs/datapath#source-port-taken",
    NoService "/docs/datapath#no-service",
    UnlistedPort "/docs/datapath#port-of-a-cluster-ip-that-no-service-has",
    UnlistedAddress "/docs/datapath#unallocated-address-of-the-service-range",
    NoFlow "/docs/datapath#syn-ack-of-no-flow",
    InternalClient "/docs/datapath#internal-client",
    DeniedSource "/docs/datapath#external-client-in---deny-source",
    SourceRanges "/docs/datapath#source-not-in-loadbalancersourceranges",
    LocalPolicy "/docs/datapath#trafficpolicy",
    NoBackends "/docs/datapath#no-backends",
    Affinity "/docs/datapath#session-affinity",
    Flows "/docs/maps#flows-and-conntrack",
    Services "/docs/maps#services",
    Seal "/docs/maps#the-seal-of-a-record",
    Arenas "/docs/maps#backends-and-tables-are-arenas",
    Explain "/docs/debugging#explain",
    FullTable "/docs/debugging#new-connections-are-dropped",
    StrayReset "/docs/metrics#stray_reset",
    InvalidFlags "/docs/metrics#invalid_flags",
    Handover "/docs/metrics#left_to_earlier",
    Limits "/docs/annotations#limits-on-new-connections",
    Timeouts "/docs/annotations#timeouts",
    ProxyHeader "/docs/proxy-protocol#how-it-gets-into-the-connection",
    ProxyExceptions "/docs/proxy-protocol#what-does-not-go-together",
    Schedulers "/docs/schedulers#schedulers",
    SynRetries "/docs/settings#--syn-retries",
    NodeLocalDns "/docs/dns#node-local-dns",
    Layer2 "/docs/announce#which-node-announces",
    Bgp "/docs/announce#by-bgp",
}

/// The path of the section about a step.
pub(crate) const fn step(step: &TraceStep) -> &'static str {
    section(step).path()
}

/// The path of the documentation of a verdict: the row of its outcome in the table of outcomes. With several
/// possible backends, this is the outcome for the first backend. Without a backend, the path leads to the start of the
/// table.
pub(crate) fn verdict(verdict: &Conclusion) -> String {
    let outcome = match verdict {
        Conclusion::Untouched { outcome }
        | Conclusion::Translated { outcome, .. }
        | Conclusion::Rejected { outcome }
        | Conclusion::Dropped { outcome } => Some(*outcome),
        Conclusion::Begins { backends } => backends.first().map(|candidate| candidate.outcome),
    };
    format!("/docs/metrics#{}", outcome.map_or("outcomes", lb_common::Outcome::as_str))
}

const fn section(step: &TraceStep) -> Section {
    match step {
        TraceStep::Attached { .. } => Section::Hooks,
        TraceStep::LeftToTc => Section::Routed,
        TraceStep::OtherHook => Section::Stack,
        TraceStep::NoPort | TraceStep::Assumed { .. } => Section::Explain,
        TraceStep::NoFlow => Section::Flows,
        TraceStep::Flow { way, .. } => forwarding(*way),
        TraceStep::NewConnection { .. } | TraceStep::Retransmission => Section::SynOnEntry,
        TraceStep::Foreign => Section::BypassesVip,
        TraceStep::PortTaken { .. } | TraceStep::OfOtherFlow => Section::PortTaken,
        TraceStep::NodePortTaken { .. } => Section::Masquerading,
        TraceStep::Full => Section::FullTable,
        TraceStep::Frontend { .. } => Section::Services,
        TraceStep::Torn => Section::Seal,
        TraceStep::SocketsOnly => Section::Sockets,
        TraceStep::NodeLocalDns { .. } => Section::NodeLocalDns,
        TraceStep::NoFrontend => Section::NoService,
        TraceStep::Address { is } => unlisted(*is),
        TraceStep::LeftToEarlier => Section::Handover,
        TraceStep::NotSyn | TraceStep::StraySynAck => Section::NoFlow,
        TraceStep::StrayReset => Section::StrayReset,
        TraceStep::InvalidFlags => Section::InvalidFlags,
        TraceStep::UnknownConnection => Section::Timeouts,
        TraceStep::Client { .. } => Section::InternalClient,
        TraceStep::DeniedSource => Section::DeniedSource,
        TraceStep::SourceRanges { .. } => Section::SourceRanges,
        TraceStep::Limit { .. } => Section::Limits,
        TraceStep::NoBackends { elsewhere: true } => Section::LocalPolicy,
        TraceStep::NoBackends { elsewhere: false } => Section::NoBackends,
        TraceStep::Affinity { .. } => Section::Affinity,
        TraceStep::Scheduler { .. } => Section::Schedulers,
        TraceStep::NextBackend => Section::SynRetries,
        TraceStep::NoSuchBackend => Section::Arenas,
        TraceStep::Masquerade { .. } => Section::Masquerading,
        TraceStep::ProxyProtocol => Section::ProxyHeader,
        TraceStep::SocketWithoutHeader { .. } => Section::ProxyExceptions,
        TraceStep::UdpConnectSucceeds => Section::Sockets,
        TraceStep::BeginsAtIngress => Section::CatchDevice,
        TraceStep::NoRoute => Section::NextHops,
        TraceStep::BypassesStack { .. } => Section::Direct,
        TraceStep::Announced { by: AnnouncedBy::Layer2 | AnnouncedBy::Nothing, .. } => Section::Layer2,
        TraceStep::Announced { by: AnnouncedBy::Bgp, .. } => Section::Bgp,
    }
}

const fn forwarding(path: ForwardingPath) -> Section {
    match path {
        ForwardingPath::Stack => Section::Stack,
        ForwardingPath::Masqueraded | ForwardingPath::Masquerade => Section::Masquerading,
        ForwardingPath::Hairpin => Section::Hairpin,
        ForwardingPath::Caught | ForwardingPath::CaughtAndMasqueraded => Section::CatchDevice,
        ForwardingPath::Routed => Section::Routed,
        ForwardingPath::Tunnel => Section::Tunnels,
        ForwardingPath::Direct => Section::Direct,
    }
}

const fn unlisted(is: Unlisted) -> Section {
    match is {
        Unlisted::OutOfRange | Unlisted::NoClusterIp => Section::NoService,
        Unlisted::UnknownVip | Unlisted::Unknown => Section::UnlistedAddress,
        Unlisted::ClusterIp => Section::UnlistedPort,
    }
}

#[cfg(test)]
mod tests {
    use lb_common::Outcome;

    use super::*;

    /// Whether the page that `lb-agent web` serves at this path has the anchor.
    fn exists(path: &str) -> bool {
        let link = path.strip_prefix("/docs/").and_then(|path| path.split_once('#'));
        let Some((page, anchor)) = link else { return false };
        lb_web::documentation(page).is_some_and(|page| page.contains(&format!(" id=\"{anchor}\"")))
    }

    #[test]
    fn every_step_has_a_section_that_exists() {
        assert!(!exists("/docs/datapath#nothing") && !exists("/docs/nothing#the-data-path"));
        for section in Section::ALL {
            assert!(exists(section.path()), "{section:?}: {}", section.path());
        }
    }

    #[test]
    fn every_outcome_has_a_row_that_exists() {
        for outcome in Outcome::ALL {
            let path = verdict(&Conclusion::Dropped { outcome });
            assert!(exists(&path), "{path}");
        }
        assert!(exists(&verdict(&Conclusion::Begins { backends: Vec::new() })));
    }
}
