//! Sets up the log, which goes to standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// Log filter for lines of the BPF programs: passes all, because the loader has set the programs' level.
const BPF: &str = "lb::=trace";
/// Silences the API server's client library, which logs every failed attempt. The source of Services logs each error
/// once.
const KUBE: [&str; 2] = ["kube_client=off", "kube_runtime=off"];
/// Silences the parser of DNS messages: it logs invalid messages, so any client could fill the log.
const DNS: &str = "hickory_proto=off";

/// Starts the log. The filter is `filter`; without it `RUST_LOG`; if that is unset or invalid, `default`. All lines of
/// the BPF programs are logged; those of the client of the API server, and of the parser of DNS messages, only if the
/// filter names them.
pub fn init(filter: Option<&str>, default: &str, format: LogFormat) {
    let from_environment = || EnvFilter::try_from_default_env().ok();
    let filter =
        filter.map(EnvFilter::new).or_else(from_environment).unwrap_or_else(|| EnvFilter::new(default));
    let filter = with_built_in(filter);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Human => log.with_ansi(io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

fn with_built_in(filter: EnvFilter) -> EnvFilter {
    let given = filter.to_string();
    let kube = KUBE.iter().filter(|_| !given.contains("kube_"));
    let dns = [&DNS].into_iter().filter(|_| !given.contains("hickory_"));
    let directives = kube.chain(dns).chain([&BPF]).filter_map(|directive| directive.parse().ok());
    directives.fold(filter, EnvFilter::add_directive)
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::{EnvFilter, filter::Directive};

    #[test]
    fn built_in_filters_are_valid() {
        for filter in super::KUBE.iter().chain([&super::BPF, &super::DNS]) {
            assert!(filter.parse::<Directive>().is_ok(), "{filter}");
        }
    }

    #[test]
    fn parser_of_dns_messages_logs_only_on_request() {
        let directives = |filter| {
            let filter = super::with_built_in(EnvFilter::new(filter)).to_string();
            filter.split(',').map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(directives("info").contains(&super::DNS.to_owned()));
        assert!(!directives("hickory_proto=debug").contains(&super::DNS.to_owned()));
    }
}
