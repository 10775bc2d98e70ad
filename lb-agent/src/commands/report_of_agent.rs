//! The report of the running agent, for commands that also work without it.

use std::path::Path;

use tracing::warn;

use crate::daemon::{report::Report, socket};

/// The report of the agent; `None` if no agent runs, or if its report cannot be read. In the second case, also warns on
/// standard error that the output lacks `lacking`.
pub(super) fn report_of_agent(bpffs: &Path, lacking: &str) -> Option<Report> {
    report_or_warning(socket::ask(bpffs), lacking).unwrap_or_else(|warning| {
        warn!("{warning}");
        None
    })
}

fn report_or_warning(
    answer: anyhow::Result<Option<Report>>,
    lacking: &str,
) -> Result<Option<Report>, String> {
    answer.map_err(|error| {
        format!(
            "cannot read the report of the agent, so {lacking} are missing here: {error:#}; run it again as root, and see \
             `lb-agent status`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_that_cannot_be_read_is_a_warning_and_a_missing_agent_is_not() {
        let report = |bpffs: &Path| report_or_warning(socket::ask(bpffs), "health checks");
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(report(folder.path()), Ok(None)), "no agent");
        // The lookup of such a long name fails with an error other than "not found". So does a lookup without
        // permission.
        let warning = report(Path::new(&"x".repeat(300))).err().unwrap();
        assert!(warning.contains("health checks are missing here: File name too long"), "{warning}");
    }
}
