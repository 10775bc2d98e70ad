//! The file of `--config`: settings under the names of their flags, or a KubeProxyConfiguration.

use std::path::Path;

use serde::Deserialize;

use super::{error::ConfigError, kube_proxy};
use crate::cli::FileSettings;

#[derive(Debug, Default, PartialEq)]
pub(super) struct File {
    pub(super) settings: FileSettings,
    /// Fields of a KubeProxyConfiguration to warn about: unknown ones, and requests for something that the agent does
    /// not do.
    pub(super) without_effect: Vec<String>,
}

impl File {
    /// Reads the file of `--config`; without a path, the result has no settings.
    pub(super) fn read(path: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|reason| ConfigError::BadFile { path: path.to_owned(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let kind: Option<Kind> = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        match kind.and_then(|object| object.kind).as_deref() {
            Some(kube_proxy::KIND) => {
                kube_proxy::parse(text).map(|(settings, without_effect)| Self { settings, without_effect })
            }
            Some(other) => Err(format!(
                "its kind is {other}: give a {}, or a file whose keys are the flags of `lb-agent run --help`",
                kube_proxy::KIND
            )),
            None => {
                let settings: Option<FileSettings> =
                    serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
                Ok(Self { settings: settings.unwrap_or_default(), without_effect: Vec::new() })
            }
        }
    }
}

/// The field `kind`, which a Kubernetes configuration object has and a file of settings lacks.
#[derive(Deserialize)]
struct Kind {
    kind: Option<String>,
}
