//! `cargo xtask`: development tasks, from installing tools to benchmarks.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod agent;
mod bench;
mod build_ebpf;
mod busy;
mod demo;
mod elf;
mod fuzz;
mod image;
mod package;
mod process;
mod release;
mod setup;
mod soak;
mod stack;
mod stages;
mod test;
mod user;
mod vm;

use self::agent::Profile;

/// Development tasks of the eBPF service load balancer.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what this machine lacks: the BPF compiler and linker, and the programs that the tests run
    Setup,
    /// Build only the BPF objects, print the size of each program, and check their stack
    BuildEbpf(build_ebpf::Args),
    /// Run the load balancer with real traffic in network namespaces of this machine (needs root)
    Demo(demo::Args),
    /// Run all tests that this machine can run (needs root)
    Test(test::Args),
    /// Run the kernel tests on other kernels, in qemu virtual machines
    Vm(vm::Args),
    /// Run as process 1 of a virtual machine that `vm` boots
    #[command(hide = true)]
    VmGuest(vm::guest::Args),
    /// Run the benchmarks (needs root)
    Bench(bench::Args),
    /// Fuzz the code that reads input from outside, with libFuzzer
    Fuzz(fuzz::Args),
    /// Change Services and kill agents at random under traffic, and check that nothing fails or leaks (needs root)
    Soak(soak::Args),
    /// Build a Debian package of the agent, with a systemd unit, man pages and completions
    Package(package::Args),
    /// Build an OCI image of the agent, without Docker
    Image(image::Args),
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
                agent::prepare(Profile::Debug)?;
            }
            demo::run(args)
        }
        Task::Test(args) => test::run(&args),
        Task::Vm(args) => {
            setup::run()?;
            vm::run(&args)
        }
        Task::VmGuest(args) => vm::guest::run(&args),
        Task::Bench(args) => bench::run(&args, &agent::prepare(Profile::Release)?),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Soak(args) => soak::run(&args, &agent::prepare(Profile::Release)?),
        Task::Package(args) => package::run(&args, &agent::prepare(Profile::Release)?),
        Task::Image(args) => image::run(&args),
    }
}
