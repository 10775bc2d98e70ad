//! Log lines on stderr.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// The modules of the BPF programs. How much they log is decided when they are loaded, so all of it is wanted.
const BPF: &str = "lb::=trace";

/// Starts to log: what `filter` says, else what `RUST_LOG` says, else what `default` says; and all that the BPF
/// programs log.
pub fn init(filter: Option<&str>, default: &str, format: LogFormat) {
    let from_environment = || EnvFilter::try_from_default_env().ok();
    let filter =
        filter.map(EnvFilter::new).or_else(from_environment).unwrap_or_else(|| EnvFilter::new(default));
    let filter = match BPF.parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Human => log.with_ansi(io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::filter::Directive;

    #[test]
    fn the_filter_for_bpf_programs_is_one() {
        assert!(super::BPF.parse::<Directive>().is_ok());
    }
}
