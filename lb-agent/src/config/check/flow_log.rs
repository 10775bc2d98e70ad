//! The settings `--flow-log…`.

use std::{path, time::Duration};

use crate::{
    cli::{FlowLogServices, RunArgs},
    config::error::{ConfigError, refused},
    flow_log::{FlowLogConfig, FlowLogTarget, Rotation},
};

/// Checks the settings of the flow log; `None` without `--flow-log`, or if that is empty.
pub(in crate::config) fn flow_log(given: &RunArgs) -> Result<Option<FlowLogConfig>, ConfigError> {
    let Some(target) = given.flow_log.as_deref().filter(|target| !target.is_empty()) else { return Ok(None) };
    let (mut target, sample) = (FlowLogTarget::from(target), given.flow_log_sample.unwrap_or(1.0));
    if let FlowLogTarget::File(path) | FlowLogTarget::Unix(path) = &mut target {
        *path = path::absolute(&path)
            .map_err(|error| refused("--flow-log", path.display(), error.to_string()))?;
    }
    if !(0.000_001..=1.0).contains(&sample) {
        return Err(refused("--flow-log-sample", sample, "give a number from 0.000001 to 1"));
    }
    Ok(Some(FlowLogConfig {
        target,
        interval: Duration::from_secs(given.flow_log_interval.unwrap_or(60).into()),
        sample: parts_per_million(sample),
        only_annotated: given.flow_log_services == Some(FlowLogServices::Annotated),
        rotation: Rotation {
            max_size: u64::from(given.flow_log_max_size.unwrap_or(100)) << 20,
            keep: given.flow_log_keep.unwrap_or(5),
        },
    }))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the caller has checked the range"
)]
fn parts_per_million(part: f64) -> u32 {
    (part * 1e6).round() as u32
}
