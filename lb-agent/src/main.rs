//! The program `lb-agent`. Under the file name `kubectl-lb`, it is the kubectl plugin.

use std::{env, ffi::OsString, iter, path::Path, process::ExitCode};

use clap::Parser as _;
use lb_agent::{
    cli::{CleanupArgs, Cli, Command, KernelArgs, LogFormat},
    commands,
    config::{Config, ConfigError, KernelPaths},
    daemon::{self, ConfigFile},
};

/// The file name under which kubectl finds this binary as the plugin `lb`.
const PLUGIN: &str = "kubectl-lb";
/// The configuration file that the package installs. If it exists and `--config` is not given, commands read it.
const DEFAULT_CONFIG: &str = "/etc/lb-agent/config.yaml";

fn main() -> ExitCode {
    let done = match plugin_arguments() {
        Some(arguments) => kubectl(arguments),
        None => run(Cli::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", explain(&error));
            // 2 for an invalid configuration: clap also exits with 2 if the usage is wrong.
            ExitCode::from(if error.is::<ConfigError>() { 2 } else { 1 })
        }
    }
}

/// The arguments of the kubectl plugin; `None` unless this binary was started under the plugin's name.
fn plugin_arguments() -> Option<Vec<OsString>> {
    let mut arguments = env::args_os();
    let name = arguments.next()?;
    (Path::new(&name).file_name()? == PLUGIN).then(|| arguments.collect())
}

fn kubectl(arguments: Vec<OsString>) -> anyhow::Result<()> {
    let name = iter::once(OsString::from(PLUGIN));
    lb_kubectl::run(lb_kubectl::Cli::parse_from(name.chain(arguments)))
}

fn run(Cli { kernel, command }: Cli) -> anyhow::Result<()> {
    let kernel = kernel.or_config_file(Path::new(DEFAULT_CONFIG));
    match command {
        Command::Run(typed) => {
            let file = ConfigFile {
                path: kernel.config.clone(),
                read: Box::new(move || Config::new(kernel.clone(), (*typed).clone())),
            };
            let config = (file.read)()?;
            daemon::logging::init(config.log_filter.as_deref(), "info", config.log_format);
            daemon::run(config, file, commands::web_pages)
        }
        Command::Ready(args) => commands::ready(&KernelPaths::only_bpffs(kernel)?, args.live),
        Command::Status(args) => commands::status(&paths(kernel)?, &args),
        Command::Announce(command) => commands::announce(&paths(kernel)?, &command),
        Command::Service(command) => commands::service(&paths(kernel)?, command),
        Command::Exec(args) => commands::exec(&paths(kernel)?, &args),
        Command::Conntrack(command) => commands::conntrack(&paths(kernel)?, command),
        Command::Explain(args) => commands::explain(&paths(kernel)?, &args),
        Command::Profile(args) => commands::profile(&paths(kernel)?, &args),
        Command::Bugreport(args) => commands::bugreport(&paths(kernel)?, &args),
        Command::Monitor(args) => commands::monitor(&paths(kernel)?, args),
        Command::Flows(args) => {
            paths(kernel)?;
            commands::flows(&args)
        }
        Command::Top(args) => commands::top(&paths(kernel)?, &args),
        Command::Web(args) => commands::web(&paths(kernel)?, &args),
        Command::Check(args) => commands::check(&paths(kernel)?, args.output),
        Command::Cleanup(CleanupArgs { kube_proxy: true, dry_run }) => {
            paths(kernel)?;
            commands::cleanup_kube_proxy(dry_run)
        }
        Command::Cleanup(_) => {
            daemon::logging::init(None, "warn", LogFormat::Human);
            commands::cleanup(&KernelPaths::only_bpffs(kernel)?)
        }
        Command::Kubectl { arguments } => kubectl(arguments),
        Command::Completions { shell } => commands::completions(shell),
        Command::ManPages { folder } => commands::man_pages(&folder),
    }
}

/// Returns the paths for a command other than `run`, and sets the log up: for warnings and errors only, unless
/// `RUST_LOG` sets another filter.
fn paths(given: KernelArgs) -> Result<KernelPaths, ConfigError> {
    daemon::logging::init(None, "warn", LogFormat::Human);
    KernelPaths::new(given)
}

/// The text of an error with its causes. Leaves out a cause whose text the errors before it already contain.
fn explain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text {
            text if text.is_empty() => cause,
            text if text.contains(&cause) => text,
            text => format!("{text}: {cause}"),
        }
    })
}
