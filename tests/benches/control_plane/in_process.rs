//! Measures the control plane as a library: from parsed objects to real maps, step by step.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use lb_agent::manifests::{Content, Edit, Manifests, ManifestsOptions};
use lb_core::{
    allocate::{DEFAULT_NODE_PORTS, OutsideRanges},
    model::{Change, Policy},
    plan::Contents,
    reconciler::Reconciler,
};
use lb_datapath::{Datapath, Options, Pinned, grace};

use lb_tests::bench::{Figure, Quantile, Unit};

use crate::{
    memory,
    report::{FULL_SYNC_LIMIT, Report},
    temporary_folder,
    workload::{CLUSTER_IP_RANGE, Folder, Size},
};

const ALL: &str = "library: all Services";
const ONE: &str = "library: one endpoint moves";
const MAPS: &str = "memory of the maps in the kernel";
const FILES: u32 = 100;

/// Measures the library `runs` times; adds the results to the report.
pub(crate) fn measure(size: Size, runs: u32, changes: u32, report: &mut Report) -> anyhow::Result<()> {
    let mut figures = Figures::default();
    for run in 1..=runs {
        eprintln!("library: run {run} of {runs}");
        one_run(size, changes, &mut figures)?;
    }
    figures.report(report);
    Ok(())
}

/// Each field has the samples of one quantity: times in seconds, counts, or the memory of each map in bytes.
#[derive(Default)]
struct Figures {
    parse: Vec<f64>,
    handle: Vec<f64>,
    plan: Vec<f64>,
    apply: Vec<f64>,
    account: Vec<f64>,
    total: Vec<f64>,
    steps: Vec<f64>,
    change: Vec<f64>,
    change_apply: Vec<f64>,
    change_steps: Vec<f64>,
    maps: BTreeMap<String, Vec<f64>>,
}

impl Figures {
    fn report(self, report: &mut Report) {
        let seconds = |place, what, samples| Figure::new(place, what, Unit::Seconds, samples);
        let count = |place, what, samples| Figure::new(place, what, Unit::Count, samples);
        report.add(seconds(ALL, "YAML to objects (100 files)", self.parse));
        report.add_limited(seconds(ALL, "objects to programmed maps", self.total), FULL_SYNC_LIMIT);
        report.add(seconds(ALL, "- store", self.handle));
        report.add(seconds(ALL, "- plan", self.plan));
        report.add(seconds(ALL, "- write to the kernel", self.apply));
        report.add(seconds(ALL, "- take note of it", self.account));
        report.add(count(ALL, "steps", self.steps));
        report.add(seconds(ONE, "event to kernel", self.change).target(Quantile::P99, 0.010));
        report.add(seconds(ONE, "- write to the kernel", self.change_apply));
        report.add(count(ONE, "steps", self.change_steps));
        for (name, samples) in self.maps {
            report.add(Figure::new(MAPS, &name, Unit::Bytes, samples));
        }
    }
}

fn one_run(size: Size, changes: u32, figures: &mut Figures) -> anyhow::Result<()> {
    let (path, _guard) = temporary_folder()?;
    let datapath = Datapath::open(&Options::new(path.join("bpffs")))?;
    let mut control_plane = ControlPlane::new(&datapath)?;
    let mut folder = Folder::new(size, FILES.min(size.services));

    let edits: Vec<Edit> = folder.files().map(|(name, text)| edit(&name, text)).collect();
    let start = Instant::now();
    let objects = control_plane.parse(&edits)?;
    figures.parse.push(start.elapsed().as_secs_f64());
    drop(edits);
    ensure!(objects.len() == 2 * size.services as usize, "only {} objects are valid", objects.len());
    let Times { handle, plan, apply, account, steps } = control_plane.synchronise(objects)?;
    figures.handle.push(handle.as_secs_f64());
    figures.plan.push(plan.as_secs_f64());
    figures.apply.push(apply.as_secs_f64());
    figures.account.push(account.as_secs_f64());
    figures.total.push((handle + plan + apply + account).as_secs_f64());
    figures.steps.push(steps as f64);
    let maps = memory::of_maps(&Pinned::open(datapath.bpffs())?.folder())?;
    maps.iter().for_each(|(name, bytes)| figures.maps.entry(name.clone()).or_default().push(*bytes as f64));
    let all = maps.iter().map(|(_, bytes)| *bytes as f64).sum();
    figures.maps.entry("all".to_owned()).or_default().push(all);

    for _ in 0..changes {
        let moved = folder.move_endpoint();
        let objects = control_plane.parse(&[edit(&moved.file, moved.text)])?;
        let Times { handle, plan, apply, account: _, steps } = control_plane.synchronise(objects)?;
        figures.change.push((handle + plan + apply).as_secs_f64());
        figures.change_apply.push(apply.as_secs_f64());
        figures.change_steps.push(steps as f64);
    }
    Ok(())
}

fn edit(name: &str, text: String) -> Edit {
    Edit { file: format!("{name}.yaml").into(), content: Content::Text(text) }
}

struct ControlPlane<'a> {
    datapath: &'a Datapath,
    manifests: Manifests,
    reconciler: Reconciler,
}

struct Times {
    handle: Duration,
    plan: Duration,
    apply: Duration,
    /// Time that the reconciler took to record the applied steps.
    account: Duration,
    steps: usize,
}

impl<'a> ControlPlane<'a> {
    fn new(datapath: &'a Datapath) -> anyhow::Result<Self> {
        let options = ManifestsOptions {
            dir: "/manifests".into(),
            cluster_ip_ranges: vec![CLUSTER_IP_RANGE.parse()?],
            other_cluster_ips: OutsideRanges::Refused,
            pod_networks: Vec::new(),
            load_balancer_pool: Vec::new(),
            load_balancer_reassign: false,
            load_balancer_class: None,
            has_members: false,
            names: None,
            node_port_range: DEFAULT_NODE_PORTS,
        };
        let reconciler =
            Reconciler::new(datapath.maps().contents()?, datapath.maps().room(), Policy::default());
        Ok(Self { datapath, manifests: Manifests::new(&options, &Contents::default()), reconciler })
    }

    fn parse(&mut self, edits: &[Edit]) -> anyhow::Result<Vec<Change>> {
        let update = self.manifests.apply(edits);
        match update.problems.first() {
            Some(problem) => Err(anyhow::anyhow!("the benchmark's own manifests are bad: {problem}")),
            None => Ok(update.changes),
        }
    }

    /// Plans and applies the changes as the agent does, including the grace period.
    fn synchronise(&mut self, objects: Vec<Change>) -> anyhow::Result<Times> {
        let (start, reconciler) = (Instant::now(), &mut self.reconciler);
        reconciler.handle(objects);
        let handled = Instant::now();
        let plan = reconciler.plan();
        let planned = Instant::now();
        self.datapath.maps().apply(&plan.steps)?;
        let applied = Instant::now();
        plan.steps.iter().for_each(|step| reconciler.applied(step));
        let accounted = Instant::now();
        ensure!(plan.problems.is_empty(), "the plan has problems: {:?}", plan.problems);
        if let Some(epoch) = reconciler.end_epoch() {
            grace::wait().context("waiting for the programs")?;
            reconciler.grace_elapsed(epoch);
        }
        Ok(Times {
            handle: handled - start,
            plan: planned - handled,
            apply: applied - planned,
            account: accounted - applied,
            steps: plan.steps.len(),
        })
    }
}
