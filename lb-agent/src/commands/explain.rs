//! The command `explain`: shows the decisions of the data plane about one packet.

use std::net::{IpAddr, SocketAddr};

use anyhow::Context as _;
use lb_common::{Address, conntrack::Tuple};
use lb_core::model::Protocol;
use serde::Serialize;

use super::{
    output::{print, print_json},
    report_of_agent::report_of_agent,
};
use crate::{
    announce::AnnouncementReport,
    cli::{ExplainArgs, TableOrJson},
    config::{ConfigError, KernelPaths, refused},
    explain::{
        self, Conclusion, Explanation, HookPoint, PacketKind, PinnedTables, Question, TraceStep, doc_of_step,
        doc_of_verdict, step_in_words, verdict_in_words,
    },
};
use lb_datapath::{Conntrack, Direction, Pinned, Routes};

/// The JSON output of `explain`. Scripts read it: keys may be added, never renamed or removed.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Page<'a> {
    from: String,
    to: SocketAddr,
    protocol: &'static str,
    at: &'static str,
    device: Option<&'a str>,
    steps: Vec<StepView<'a>>,
    #[serde(flatten)]
    verdict: &'a Conclusion,
    /// The verdict as a sentence.
    text: String,
    /// The section of the documentation about the verdict, as a path of `lb-agent web`.
    doc: String,
}

#[derive(Serialize)]
struct StepView<'a> {
    #[serde(flatten)]
    step: &'a TraceStep,
    text: String,
    /// The section of the documentation about the step, as a path of `lb-agent web`.
    doc: &'static str,
}

/// Runs `explain`.
///
/// # Errors
/// There is no data plane, it cannot be read, the arguments contradict each other, or there is no such interface.
pub fn explain(paths: &KernelPaths, args: &ExplainArgs) -> anyhow::Result<()> {
    let answer = Answer::find(paths, args)?;
    match args.output {
        TableOrJson::Json => print_json(&answer.page(args)),
        TableOrJson::Table => print(&answer.text(args)),
    }
}

/// The answer as JSON.
///
/// # Errors
/// Those of [`explain()`].
pub(super) fn json(paths: &KernelPaths, args: &ExplainArgs) -> anyhow::Result<serde_json::Value> {
    Ok(serde_json::to_value(Answer::find(paths, args)?.page(args))?)
}

/// The explanation of a packet, with the question, and the interface at which the packet passes the hook.
struct Answer {
    explanation: Explanation,
    protocol: Protocol,
    question: Question,
    device: Option<String>,
}

impl Answer {
    fn find(paths: &KernelPaths, args: &ExplainArgs) -> anyhow::Result<Self> {
        let protocol = protocol(args)?;
        check_families(args)?;
        let pinned = Pinned::open(&paths.bpffs)?;
        let mut routes = Routes::open()?;
        let device = entrance(&mut routes, args)?;
        let attached = Attached::of(&pinned, device)?;
        let hook = hook(args, &attached, &mut routes)?;
        let from_node = routes.is_own(args.from.ip)?;
        let question = Question { from_node, ..question(args, protocol, hook, device) };
        let tables = PinnedTables::open(&pinned, device)?;
        let explanation = explain::explain(&tables, &question)?;
        let name = routes.name(device);
        let mut steps = explanation.steps.clone();
        if let (Some(name), Some(program)) = (name, attached.at(hook)) {
            steps.insert(0, TraceStep::Attached { device: name.to_owned(), at: hook.as_str(), program });
        }
        steps.splice(0..0, tables.assumed());
        steps.splice(0..0, announced(paths, args.to.socket.ip()));
        let explanation = Explanation { steps, ..explanation };
        Ok(Self { explanation, protocol, question, device: name.map(str::to_owned) })
    }

    fn page<'a>(&'a self, args: &ExplainArgs) -> Page<'a> {
        let Self { explanation, protocol, question, device } = self;
        let view = |step: &'a TraceStep| StepView { step, text: step_in_words(step), doc: doc_of_step(step) };
        Page {
            from: args.from.to_string(),
            to: args.to.socket,
            protocol: protocol.as_str(),
            at: question.hook.as_str(),
            device: device.as_deref(),
            steps: explanation.steps.iter().map(view).collect(),
            verdict: &explanation.verdict,
            text: verdict_in_words(&explanation.verdict, question).join("\n"),
            doc: doc_of_verdict(&explanation.verdict),
        }
    }

    fn text(&self, args: &ExplainArgs) -> String {
        let Self { explanation, protocol, question, device } = self;
        let device = device.as_ref().map_or_else(String::new, |name| format!(" of {name}"));
        let at = match question.hook {
            HookPoint::Socket => "in a system call of this node".to_owned(),
            hook @ (HookPoint::Xdp | HookPoint::Ingress | HookPoint::Egress) => {
                format!("at {}{device}", hook.as_str())
            }
        };
        let protocol = protocol.as_str();
        let mut text = format!("{protocol} {} -> {}, {at}\n\n", args.from, args.to.socket);
        for (number, step) in (1..).zip(&explanation.steps) {
            text.push_str(&format!("{number:>3}. {}\n", step_in_words(step)));
        }
        let verdict = verdict_in_words(&explanation.verdict, question);
        text.push_str(&format!("\n  => {}\n", verdict.join("\n     ")));
        text
    }
}

/// The steps that name the announcers of the address, at layer 2 and by BGP; none if no agent answers, or the agent
/// does not report the address.
fn announced(paths: &KernelPaths, address: IpAddr) -> Vec<TraceStep> {
    let report = report_of_agent(&paths.bpffs, "announcers");
    let announcements = report.into_iter().flat_map(|report| report.announcements);
    let step = |it: AnnouncementReport| {
        let AnnouncementReport { node, here, since, by, advertisements, .. } = it;
        TraceStep::Announced { address, node, here, since, by, advertisements }
    };
    announcements.filter(|it| it.address == address).map(step).collect()
}

/// The interface that the packet arrives on: the given interface, or the interface of the route to the source of the
/// packet. 0 if there is no route.
fn entrance(routes: &mut Routes, args: &ExplainArgs) -> anyhow::Result<u32> {
    match &args.device {
        Some(name) => routes.device(name).with_context(|| {
            let names: Vec<_> = routes.names().collect();
            format!("there is no device {name} in this network namespace, only {}", names.join(", "))
        }),
        None => Ok(routes.to(args.from.ip)?.map_or(0, |route| route.device)),
    }
}

/// Whether programs are attached: `xdp`, `ingress` and `egress` to the interface of the packet, if that interface is
/// `known`, and `sockets` to a cgroup.
struct Attached {
    known: bool,
    xdp: bool,
    ingress: bool,
    egress: bool,
    sockets: bool,
}

impl Attached {
    fn of(pinned: &Pinned, device: u32) -> anyhow::Result<Self> {
        let tc = pinned.attachments()?;
        let on = |direction| tc.iter().any(|a| a.index == device && a.direction == direction);
        Ok(Self {
            known: device != 0,
            xdp: pinned.xdp_attachments()?.iter().any(|a| a.index == device),
            ingress: on(Direction::Ingress),
            egress: on(Direction::Egress),
            sockets: !pinned.socket_attachments()?.is_empty(),
        })
    }

    /// Whether the program of this hook is attached; `None` for system calls, or if the interface is unknown.
    const fn at(&self, hook: HookPoint) -> Option<bool> {
        match hook {
            _ if !self.known => None,
            HookPoint::Xdp => Some(self.xdp),
            HookPoint::Ingress => Some(self.ingress),
            HookPoint::Egress => Some(self.egress),
            HookPoint::Socket => None,
        }
    }
}

/// The hook that the user gave, or the first one that the packet passes.
fn hook(args: &ExplainArgs, attached: &Attached, routes: &mut Routes) -> anyhow::Result<HookPoint> {
    Ok(match args.at {
        Some(hook) => hook,
        None if args.device.is_none() && attached.sockets && routes.is_own(args.from.ip)? => {
            HookPoint::Socket
        }
        None if attached.xdp => HookPoint::Xdp,
        None => HookPoint::Ingress,
    })
}

/// The protocol of the packet.
fn protocol(args: &ExplainArgs) -> Result<Protocol, ConfigError> {
    match (args.to.protocol, args.protocol) {
        (Some(one), Some(other)) if one != other => {
            let reason = format!("--to names {}: name one protocol", one.as_str());
            Err(refused("--protocol", other.as_str(), reason))
        }
        (one, other) => Ok(one.or(other).unwrap_or(Protocol::Tcp)),
    }
}

fn check_families(args: &ExplainArgs) -> Result<(), ConfigError> {
    let (from, to) = (args.from.ip, args.to.socket);
    if from.is_ipv4() == to.is_ipv4() {
        return Ok(());
    }
    let reason = format!("--to {to} is of the other address family");
    Err(refused("--from", from, reason))
}

fn question(args: &ExplainArgs, protocol: Protocol, hook: HookPoint, device: u32) -> Question {
    let (from, to) = (args.from, args.to.socket);
    let address = Address::from;
    let port = from.port.unwrap_or(0);
    Question {
        tuple: Tuple::new(address(from.ip), address(to.ip()), port, to.port(), protocol.number()),
        knows_port: from.port.is_some(),
        kind: PacketKind::Syn,
        hook,
        from_node: false,
        device,
        now: Conntrack::now(),
    }
}
