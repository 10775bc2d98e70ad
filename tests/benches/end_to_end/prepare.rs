//! Sets up all nodes before the measurements.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;
use lb_tests::netns::unique_prefix;
use serde::Serialize;

use crate::{
    cpu::Cpus,
    family::Family,
    node::Node,
    rounds::{Candidate, Field},
    system::{Running, Setup, System},
    way::Way,
    workload::{Size, Workload},
};

/// How long a load balancer took from its start until it worked.
#[derive(Debug, Serialize)]
pub(crate) struct Preparation {
    pub(crate) system: System,
    pub(crate) size: Size,
    pub(crate) seconds: f64,
}

/// The load balancers, paths and sizes to compare, and the options for the setup of the load balancers.
pub(crate) struct Plan {
    pub(crate) family: Family,
    pub(crate) ways: Vec<Way>,
    pub(crate) systems: Vec<System>,
    pub(crate) sizes: Vec<Size>,
    pub(crate) setup: Setup,
    pub(crate) cpus: Cpus,
    pub(crate) time: Duration,
}

/// All nodes, their candidates, and guards that keep the load balancers running.
pub(crate) struct Prepared {
    _running: Vec<Running>,
    pub(crate) field: Field,
    pub(crate) preparations: Vec<Preparation>,
}

impl Plan {
    /// Creates a node without a load balancer. Then creates, for each size, a node for each load balancer that is
    /// measured on one of the paths, and starts the load balancer on the node.
    pub(crate) fn prepare(&self) -> Result<Prepared> {
        let mut nodes = vec![Node::create(&unique_prefix(), self.family)?];
        let baseline = |way: &Way| Candidate { system: System::Nothing, way: *way, size: None, node: 0 };
        let mut candidates: Vec<Candidate> = self.ways.iter().map(baseline).collect();
        let (mut running, mut preparations) = (Vec::new(), Vec::new());
        let workloads: BTreeMap<Size, Workload> =
            self.sizes.iter().map(|size| (*size, Workload::new(self.family, *size))).collect();
        for (size, workload) in workloads {
            for &system in &self.systems {
                let ways: Vec<Way> = self.ways.iter().copied().filter(|way| system.serves(*way)).collect();
                if ways.is_empty() {
                    continue;
                }
                let node = Node::create(&unique_prefix(), self.family)?;
                let start = Instant::now();
                running.push(self.setup.start(system, &node, &workload)?);
                let seconds = start.elapsed().as_secs_f64();
                let Size { services, endpoints } = size;
                eprintln!(
                    "{services} Services, {endpoints} endpoints: {system:?} works after {seconds:.2} s"
                );
                preparations.push(Preparation { system, size, seconds });
                let node_index = nodes.len();
                nodes.push(node);
                let of_way = |way| Candidate { system, way, size: Some(size), node: node_index };
                candidates.extend(ways.into_iter().map(of_way));
            }
        }
        let field = Field { family: self.family, nodes, candidates, time: self.time, cpus: self.cpus };
        Ok(Prepared { _running: running, field, preparations })
    }
}
