//! `lb-agent`: the command line.

use std::process::ExitCode;

use clap::Parser as _;
use lb_agent::{
    cli::{CleanupArgs, Cli, Command, LogFormat, PlaceArgs},
    commands,
    config::{Config, ConfigError, Place},
    daemon::{self, ConfigFile},
};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", explain(&error));
            // As clap does for bad usage.
            ExitCode::from(if error.is::<ConfigError>() { 2 } else { 1 })
        }
    }
}

fn run(Cli { place, command }: Cli) -> anyhow::Result<()> {
    match command {
        Command::Run(typed) => {
            let file = ConfigFile {
                path: place.config.clone(),
                read: Box::new(move || Config::new(place.clone(), (*typed).clone())),
            };
            let config = (file.read)()?;
            daemon::logging::init(config.log_filter.as_deref(), "info", config.log_format);
            daemon::run(config, file)
        }
        Command::Status(args) => commands::status(&looked_at(place)?, args.output),
        Command::Service(command) => commands::service(&looked_at(place)?, command),
        Command::Conntrack(command) => commands::conntrack(&looked_at(place)?, command),
        Command::Explain(args) => commands::explain(&looked_at(place)?, &args),
        Command::Profile(args) => commands::profile(&looked_at(place)?, &args),
        Command::Bugreport(args) => commands::bugreport(&looked_at(place)?, &args),
        Command::Monitor(args) => commands::monitor(&looked_at(place)?, args),
        Command::Top(args) => commands::top(&looked_at(place)?, &args),
        Command::Check(args) => commands::check(&looked_at(place)?, args.output),
        Command::Cleanup(CleanupArgs { kube_proxy: true, dry_run }) => {
            looked_at(place)?;
            commands::cleanup_kube_proxy(dry_run)
        }
        Command::Cleanup(_) => commands::cleanup(&looked_at(place)?),
        Command::Completions { shell } => commands::completions(shell),
    }
}

/// The place a command looks at; it logs only what is wrong.
fn looked_at(typed: PlaceArgs) -> Result<Place, ConfigError> {
    daemon::logging::init(None, "warn", LogFormat::Human);
    Place::new(typed)
}

/// The error and its causes. Some errors tell their cause themselves; that is not said twice.
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
