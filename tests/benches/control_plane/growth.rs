//! Bar plots of the results, by number of Services.

use std::path::Path;

use lb_tests::bench::{Bar, Plot};

use crate::workload::Size;

/// The results for one number of Services.
pub(crate) struct Growth {
    pub(crate) size: Size,
    /// Seconds from when the API server has sent the lists of Services and EndpointSlices until `/healthz` succeeds.
    pub(crate) start: Range,
    /// Milliseconds from the watch event of a changed slice until the kernel has the change.
    pub(crate) change: Range,
    /// The agent's greatest resident memory, in megabytes.
    pub(crate) resident_peak: Range,
}

/// Smallest, median and greatest of several samples.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    min: f64,
    median: f64,
    max: f64,
}

impl Range {
    /// The range of the samples, of which there must be at least one.
    pub(crate) fn of(samples: impl Iterator<Item = f64>) -> Self {
        let mut samples: Vec<f64> = samples.collect();
        samples.sort_by(f64::total_cmp);
        let at = |rank: usize| samples.get(rank).copied().unwrap_or(f64::NAN);
        Self {
            min: at(0),
            median: at(samples.len().saturating_sub(1) / 2),
            max: at(samples.len().saturating_sub(1)),
        }
    }
}

/// Writes one plot per quantity to the folder.
pub(crate) fn plot(sizes: &[Growth], machine: &str, folder: &Path) -> anyhow::Result<()> {
    let write = |file: &str, title: &str, unit: &str, of: &dyn Fn(&Growth) -> Range| {
        let bar = |size: &Growth| {
            let Range { min, median, max } = of(size);
            Bar { label: size.size.to_string(), min, median, max, is_reference: false }
        };
        let notes = vec![machine.to_owned(), "cargo xtask bench control-plane".to_owned()];
        let bars = sizes.iter().map(bar).collect();
        Plot { title: title.to_owned(), notes, unit: unit.to_owned(), bars }.write(&folder.join(file))
    };
    write("control-plane-start.svg", "API server: end of the lists to /healthz", "seconds", &|size| {
        size.start
    })?;
    write(
        "control-plane-change.svg",
        "API server: one changed slice to the kernel",
        "milliseconds",
        &|size| size.change,
    )?;
    write("control-plane-memory.svg", "API server: agent's memory at its highest", "megabytes", &|size| {
        size.resident_peak
    })
}
