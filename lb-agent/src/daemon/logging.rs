//! The log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// The filter for log lines of the BPF programs. It passes all of them, because the loader has set their level.
const BPF: &str = "lb::=trace";
/// The client of the API server logs every failed attempt; the source of Services logs the error once instead.
const KUBE: [&str; 2] = ["kube_client=off", "kube_runtime=off"];

/// Starts the log. The filter is `filter`, or `RUST_LOG` without it, or `default` without both. All lines of the BPF
/// programs are logged; those of the client of the API server only if the filter names it.
pub fn init(filter: Option<&str>, default: &str, format: LogFormat) {
    let from_environment = || EnvFilter::try_from_default_env().ok();
    let filter =
        filter.map(EnvFilter::new).or_else(from_environment).unwrap_or_else(|| EnvFilter::new(default));
    let names_kube = filter.to_string().contains("kube_");
    let kube = KUBE.iter().filter(|_| !names_kube);
    let directives = kube.chain([&BPF]).filter_map(|directive| directive.parse().ok());
    let filter = directives.fold(filter, EnvFilter::add_directive);
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
    fn built_in_filters_are_valid() {
        for filter in super::KUBE.iter().chain([&super::BPF]) {
            assert!(filter.parse::<Directive>().is_ok(), "{filter}");
        }
    }
}
