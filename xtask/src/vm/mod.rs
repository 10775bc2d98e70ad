//! `cargo xtask vm`: the kernel tests on the kernels of supported distributions.
//!
//! ```text
//! kernel   finds and downloads kernels     binaries builds tests and agents
//! plan     selects the tests               image    the initramfs: tests, tools, libraries, modules
//! qemu     boots the image                 guest    process 1 of the guest
//! report   the guest's results by line     docs     the table in docs/kernels.md
//! skips    reasons of skipped tests        wire     the guest's network cards
//! ```

use std::borrow::Cow;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::setup;

mod binaries;
mod docs;
mod folders;
pub(crate) mod guest;
mod image;
pub(crate) mod kernel;
mod plan;
pub(crate) mod qemu;
mod report;
mod skips;
pub(crate) mod tree;
mod wire;

use self::folders::folder;
use self::kernel::Kernel;
use self::plan::Extent;
use self::qemu::Accelerator;
use self::report::{Record, Report};
use self::wire::Wires;

/// Arguments of `vm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernel to boot: a version of a Debian package (6.1), `host`, or the folder or .deb file of a Debian kernel
    /// package; repeat it for several kernels
    #[arg(long = "kernel", value_name = "VERSION|host|PATH", default_values = kernel::DEFAULTS)]
    kernels: Vec<String>,
    /// Run all tests, also those that are slow without hardware virtualization
    #[arg(long)]
    full: bool,
    /// Run only tests whose name (`packet::sctp::…`, `netns::sockets::…`) contains this; repeat it for several names
    #[arg(long = "test", value_name = "NAME", conflicts_with = "full")]
    tests: Vec<String>,
    /// Run this agent instead of building one for release
    #[arg(long, value_name = "PATH")]
    agent: Option<PathBuf>,
    /// Run each test on only one of the two kernels, and skip all namespace tests except `netns::balancing`
    #[arg(long, conflicts_with_all = ["kernels", "full", "tests"])]
    share: bool,
    /// Write the table of kernels and features to docs/kernels.md; without this option a stale table is an error
    #[arg(long)]
    write_docs: bool,
}

impl Args {
    /// The arguments that `cargo xtask test --vm`, and thus `.ci/run`, uses.
    pub(crate) fn of_ci(agent: PathBuf) -> Self {
        Self {
            kernels: kernel::DEFAULTS.map(str::to_owned).to_vec(),
            full: false,
            tests: Vec::new(),
            agent: Some(agent),
            share: true,
            write_docs: false,
        }
    }

    fn extent(&self) -> Extent {
        match (self.full, self.tests.is_empty()) {
            (true, _) => Extent::Full,
            (false, true) => Extent::Short,
            (false, false) => Extent::Named(self.tests.clone()),
        }
    }
}

/// Runs the tests on every kernel, even if they failed on an earlier one.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::install(&setup::VM_TOOLS)?;
    let kernels: Vec<Kernel> =
        args.kernels.iter().map(|name| kernel::find(name)).collect::<Result<_, _>>()?;
    binaries::build_agents(args.agent.as_deref())?;
    let tests = binaries::build_tests()?;
    let accelerator = qemu::accelerator(kernels.first().context("no kernel was given")?)?;
    let plan = plan::plan(&args.extent(), &tests)?;
    let share_of = |kernel: &Kernel| match args.share {
        true => Cow::Owned(plan.share(kernel.name == kernel::DEFAULTS[0])),
        false => Cow::Borrowed(&plan),
    };
    let mut reports = Vec::new();
    let mut failed = Vec::new();
    let needs_cards = plan.needs_cards();
    for kernels in kernels.chunks(accelerator.guests_at_once()) {
        for kernel in kernels {
            image::write(&image_of(kernel)?, kernel, &tests, &share_of(kernel))?;
        }
        let results: Vec<Option<Report>> = thread::scope(|scope| {
            let boot = |kernel| scope.spawn(move || run_one(kernel, accelerator, needs_cards));
            let guests: Vec<_> = kernels.iter().map(boot).collect();
            guests.into_iter().map(|guest| guest.join().unwrap_or_default()).collect()
        });
        for (kernel, report) in kernels.iter().zip(results) {
            if report.as_ref().is_none_or(|report| report.failed() > 0) {
                failed.push(kernel.release.as_str());
            }
            reports.extend(report.map(|report| (kernel.name.clone(), report)));
        }
    }
    ensure!(failed.is_empty(), "failed on {}", failed.join(", "));
    docs::compare_or_write(&reports, args.write_docs)
}

/// Boots the kernel with its image; prints the summary of the tests, or why the guest has given no complete report.
fn run_one(kernel: &Kernel, accelerator: Accelerator, needs_cards: bool) -> Option<Report> {
    let start = Instant::now();
    match boot(kernel, accelerator, needs_cards) {
        Ok(report) => {
            println!("{}, in {}", report.summary(&kernel.release), minutes(start.elapsed()));
            Some(report)
        }
        Err(error) => {
            println!("vm {}: no result: {error:#}", kernel.release);
            None
        }
    }
}

fn boot(kernel: &Kernel, accelerator: Accelerator, needs_cards: bool) -> anyhow::Result<Report> {
    let image = image_of(kernel)?;
    let megabytes = fs::metadata(&image).map(|file| file.len() >> 20).unwrap_or_default();
    eprintln!("vm {}: booting, {accelerator}, an initramfs of {megabytes} MB", kernel.release);
    let show = |record: &Record| eprint!("{}", record.progress(&kernel.name));
    let wires = needs_cards.then(Wires::create).transpose()?;
    let outcome = qemu::boot(kernel, &image, &folder(&kernel.release)?, accelerator, wires.as_ref(), show)?;
    fs::remove_file(&image).with_context(|| format!("cannot remove {}", image.display()))?;
    outcome.judge()
}

fn image_of(kernel: &Kernel) -> anyhow::Result<PathBuf> {
    Ok(folder(&kernel.release)?.join("initramfs.cpio"))
}

fn minutes(took: Duration) -> String {
    format!("{}:{:02} min", took.as_secs() / 60, took.as_secs() % 60)
}
