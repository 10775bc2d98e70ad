//! Log lines on stderr.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// Starts to log: what `filter` says, else what `RUST_LOG` says, else what `default` says.
pub fn init(filter: Option<&str>, default: &str, format: LogFormat) {
    let from_environment = || EnvFilter::try_from_default_env().ok();
    let filter =
        filter.map(EnvFilter::new).or_else(from_environment).unwrap_or_else(|| EnvFilter::new(default));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Human => log.with_ansi(io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}
