//! Log lines on stderr.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// The modules of the BPF programs. How much they log is decided when they are loaded, so all of it is wanted.
const BPF: &str = "lb::=trace";
/// The client of the API server logs every attempt that fails; the source says once what that means.
const KUBE: [&str; 2] = ["kube_client=off", "kube_runtime=off"];

/// Starts to log: what `filter` says, else what `RUST_LOG` says, else what `default` says; and all that the BPF
/// programs log. The client of the API server is silent unless the filter names it.
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
    fn the_filters_of_our_own_are_some() {
        for filter in super::KUBE.iter().chain([&super::BPF]) {
            assert!(filter.parse::<Directive>().is_ok(), "{filter}");
        }
    }
}
