//! `cargo xtask`: everything with side effects.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod build_ebpf;
mod demo;
mod process;
mod setup;
mod soak;
mod stages;
mod test;
mod vm;

/// Development tasks of the eBPF service load balancer.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing on this machine: the BPF compiler and linker, and the tools of the tests
    Setup,
    /// Build the BPF objects only, and say how large each program is
    BuildEbpf(build_ebpf::Args),
    /// Show the load balancer at work in network namespaces of this machine (needs root)
    Demo(demo::Args),
    /// Run every test that can run on this machine (needs root)
    Test(test::Args),
    /// Run the tests that need root on other kernels, under qemu
    Vm(vm::Args),
    /// What a guest of `vm` runs as process 1
    #[command(hide = true)]
    VmGuest(vm::guest::Args),
    /// Run the benchmarks (needs root)
    Bench(bench::Args),
    /// Change Services and kill agents at random under traffic, and see that nothing fails or leaks (needs root)
    Soak(soak::Args),
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Setup => setup::run(),
        Task::BuildEbpf(args) => build_ebpf::run(args),
        Task::Demo(args) => {
            if args.needs_agent() {
                prepare_agent()?;
            }
            demo::run(args)
        }
        Task::Test(args) => test::run(&args),
        Task::Vm(args) => {
            setup::run()?;
            vm::run(&args)
        }
        Task::VmGuest(args) => vm::guest::run(&args),
        Task::Bench(args) => {
            prepare_agent()?;
            bench::run(&args)
        }
        Task::Soak(args) => {
            prepare_agent()?;
            soak::run(&args)
        }
    }
}

/// Builds `target/release/lb-agent`, from nothing if need be.
fn prepare_agent() -> anyhow::Result<()> {
    setup::run()?;
    process::run(test::build_agent())
}
