//! A program that is measured, with its packets.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunOptions,
    maps::ProgramArray,
    programs::{ProgramFd, SchedClassifier, Xdp},
};
use nix::{
    libc,
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

use crate::frames::Frame;

/// The kind of hook that a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Tc,
    Xdp,
}

impl Kind {
    /// The kind of hook of the program with this name.
    pub(crate) fn of(program: &str) -> Self {
        if program.starts_with("xdp") { Self::Xdp } else { Self::Tc }
    }

    /// Start of the names of programs for this kind of hook.
    pub(crate) const fn prefix(self) -> &'static str {
        match self {
            Self::Tc => "tc",
            Self::Xdp => "xdp",
        }
    }
}

/// A program that gets a fresh packet for every run, see `lb-ebpf-bench/src/restore.rs`.
pub(crate) struct Candidate {
    restore: Ebpf,
    kind: Kind,
    frame: Frame,
    /// The context of test runs, which contains the device that packets arrive on.
    context: Vec<u8>,
}

/// The result of the program for one packet: its return code, and the packet after the run.
pub(crate) struct Done {
    pub(crate) verdict: u32,
    pub(crate) output: Vec<u8>,
}

impl Candidate {
    /// Prepares `program`; `restore` is the path of the BPF object that gives it fresh packets.
    pub(crate) fn new(
        restore: &Path,
        kind: Kind,
        program: &ProgramFd,
        frame: &Frame,
    ) -> anyhow::Result<Self> {
        let template = frame.template()?;
        let mut restore = EbpfLoader::new()
            .override_global("TEMPLATE", bytemuck::bytes_of(&template), true)
            .load_file(restore)
            .with_context(|| format!("loading {}", restore.display()))?;
        load(&mut restore, kind.restore())?;
        let map = restore.map_mut("MEASURED").context("there is no map MEASURED")?;
        ProgramArray::try_from(map)?.set(0, program, 0).context("adding the program to MEASURED")?;
        Ok(Self { restore, kind, frame: frame.clone(), context: kind.context(frame) })
    }

    /// Runs the program on one packet of the next flow.
    pub(crate) fn once(&self) -> anyhow::Result<Done> {
        let mut output = vec![0; self.frame.bytes().len() + 256];
        let (verdict, length) = self.test_run(1, Some(&mut output))?;
        output.truncate(length);
        Ok(Done { verdict, output })
    }

    /// Runs the program on this number of packets; returns the CPU time per packet in nanoseconds.
    pub(crate) fn run(&self, packets: u32) -> anyhow::Result<f64> {
        let start = cpu_time()?;
        self.test_run(packets, None)?;
        Ok((cpu_time()? - start).as_secs_f64() * 1e9 / f64::from(packets))
    }

    /// Runs `repeat` packets in the kernel; returns the last return code, and the length of the last packet.
    fn test_run(&self, repeat: u32, output: Option<&mut [u8]>) -> anyhow::Result<(u32, usize)> {
        let mut options = TestRunOptions::new();
        options.data_in = Some(self.frame.bytes());
        options.data_out = output;
        options.ctx_in = Some(&self.context);
        options.repeat = repeat;
        let program = self.restore.program(self.kind.restore()).context("it was loaded")?;
        let result = match self.kind {
            Kind::Tc => <&SchedClassifier>::try_from(program)?.test_run(options),
            Kind::Xdp => <&Xdp>::try_from(program)?.test_run(options),
        };
        let result = result.context("running a program on packets")?;
        Ok((result.return_value, usize::try_from(result.data_size_out)?))
    }

    pub(crate) const fn kind(&self) -> Kind {
        self.kind
    }

    /// The packets that the program gets.
    pub(crate) const fn frame(&self) -> &Frame {
        &self.frame
    }
}

impl Kind {
    /// The context for test runs of programs of this kind: `struct __sk_buff` up to `ifindex`, or `struct xdp_md`.
    fn context(self, frame: &Frame) -> Vec<u8> {
        let device = frame.device();
        let words: &[u32] = match self {
            Self::Tc => &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, device],
            // The fields of `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index,
            // egress_ifindex.
            Self::Xdp => &[0, u32::try_from(frame.bytes().len()).unwrap_or(u32::MAX), 0, device, 0, 0],
        };
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    const fn restore(self) -> &'static str {
        match self {
            Self::Tc => "tc_restore",
            Self::Xdp => "xdp_restore",
        }
    }
}

/// Loads a program into the kernel.
pub(crate) fn load(ebpf: &mut Ebpf, name: &str) -> anyhow::Result<()> {
    let program = ebpf.program_mut(name).with_context(|| format!("the object has no program {name}"))?;
    let result = match Kind::of(name) {
        Kind::Tc => <&mut SchedClassifier>::try_from(program)?.load(),
        Kind::Xdp => <&mut Xdp>::try_from(program)?.load(),
    };
    result.with_context(|| format!("loading the program {name} (are you root?)"))
}

/// The descriptor of a loaded program.
pub(crate) fn program<'a>(ebpf: &'a Ebpf, name: &str) -> anyhow::Result<&'a ProgramFd> {
    let program = ebpf.program(name).with_context(|| format!("the object has no program {name}"))?;
    program.fd().with_context(|| format!("the program {name} is not loaded"))
}

/// CPU time that this thread has used. It includes the time of interrupts, unless the kernel accounts for that time
/// separately (`CONFIG_IRQ_TIME_ACCOUNTING`).
fn cpu_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// The last CPU that this process may use, and the one before it, if any.
pub(crate) fn cpus() -> anyhow::Result<(usize, Option<usize>)> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let mut cpus = (0..CpuSet::count()).rev().filter(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    Ok((cpus.next().context("this process may run on no CPU")?, cpus.next()))
}

/// Pins this thread, and threads that it starts later, to a CPU.
pub(crate) fn pin(cpu: usize) -> anyhow::Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &one)?;
    ensure!(sched_getaffinity(Pid::from_raw(0))? == one, "this process cannot be bound to CPU {cpu}");
    Ok(())
}

/// Pins this thread to a CPU and gives it the real-time policy `SCHED_FIFO`, so that it has priority over all threads
/// with ordinary policies.
pub(crate) fn claim(cpu: usize) -> anyhow::Result<()> {
    pin(cpu)?;
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel only reads the structure, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    nix::Error::result(result).context("taking a real-time priority")?;
    Ok(())
}

/// Builds a BPF object in the folder of the workspace's other objects; returns its path.
pub(crate) fn build(binary: ebpf_build::Binary) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot tell where the benchmark itself is")?;
    // The path of the benchmark's executable is target/release/deps/packets-….
    let profile_dir = me.ancestors().nth(2).context("the benchmark is not in a target folder")?;
    let target_dir = ebpf_build::target_dir(profile_dir);
    Ok(ebpf_build::build(binary, &target_dir, std::env::consts::ARCH)?.path)
}
