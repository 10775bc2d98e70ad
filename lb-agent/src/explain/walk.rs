//! The state of an explanation: the steps so far, and lookups that several parts share.

use lb_common::{
    Outcome, Settings,
    conntrack::{Flow, Segment},
};
use lb_datapath::{DatapathError, Route};

use super::{
    Question,
    step::{Conclusion, TraceStep},
    tables::Tables,
};

/// Why an explanation ends early.
pub(super) enum Stop {
    /// The verdict on the packet is known.
    With(Conclusion),
    /// A map or a route cannot be read.
    Failed(DatapathError),
}

impl From<DatapathError> for Stop {
    fn from(error: DatapathError) -> Self {
        Self::Failed(error)
    }
}

/// The result of one part of the explanation, or [`Stop`], which ends it.
pub(super) type WalkResult<T> = Result<T, Stop>;

/// An unfinished explanation: the question, the tables, and the steps found so far.
pub(super) struct Walk<'a, T> {
    pub(super) tables: &'a T,
    pub(super) question: &'a Question,
    pub(super) segment: Segment,
    pub(super) steps: Vec<TraceStep>,
    /// Whether the XDP program has chosen a backend, and then left the packet to tc. If the flow to that backend is
    /// routed, the program has also created that flow.
    pub(super) is_left_by_xdp: bool,
}

impl<'a, T: Tables> Walk<'a, T> {
    pub(super) fn new(tables: &'a T, question: &'a Question) -> Self {
        Self { tables, question, segment: question.segment(), steps: Vec::new(), is_left_by_xdp: false }
    }

    /// The route by which packets of the flow bypass the stack under `--forwarding direct`; `None` if they take the
    /// stack. Like `forward::direct`. Not for routed flows, which bypass the stack in any case.
    pub(super) fn direct_exit(&self, flow: &Flow) -> WalkResult<Option<Route>> {
        // Assumes that a device without an entry in `DEVICES` has a link-layer header.
        let has_link_layer = self.tables.device(self.question.device)?.is_none_or(|it| it.has_link_layer());
        if !has_link_layer || !flow.may_bypass_stack(self.tables.globals().direct) {
            return Ok(None);
        }
        Ok(self.tables.route(&flow.to.destination)?.filter(|route| route.neighbour))
    }

    /// Adds a step that names the device through which packets bypass the stack.
    pub(super) fn note_exit(&mut self, route: &Route) {
        let name = self.tables.device_name(route.device);
        let step = TraceStep::BypassesStack { device: name.unwrap_or_else(|| format!("#{}", route.device)) };
        if !self.steps.contains(&step) {
            self.steps.push(step);
        }
    }

    /// The settings of the node; `None` until the agent has written them.
    pub(super) fn settings(&self) -> WalkResult<Option<Settings>> {
        Ok(Some(self.tables.settings()?).filter(Settings::is_written))
    }

    pub(super) fn name_of(&self, service: u32) -> WalkResult<String> {
        Ok(self.tables.service_name(service)?.unwrap_or_else(|| format!("service #{service}")))
    }
}

/// The verdict of a packet that the programs leave untouched.
pub(super) const fn untouched(outcome: Outcome) -> Conclusion {
    Conclusion::Untouched { outcome }
}
