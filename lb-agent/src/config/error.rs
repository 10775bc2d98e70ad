use std::path::PathBuf;

use super::IN_CLUSTER;

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}: give --config a file that exists and is readable", path.display())]
    Unreadable {
        /// Path of the configuration file.
        path: PathBuf,
        /// Error of the read.
        source: std::io::Error,
    },
    /// The content of the configuration file is invalid.
    #[error("the configuration file {} is invalid: {reason}", path.display())]
    BadFile {
        /// Path of the configuration file.
        path: PathBuf,
        /// What is invalid in the file.
        reason: String,
    },
    /// A setting has an invalid value.
    #[error("{setting}: {value:?} is invalid: {reason}")]
    BadValue {
        /// The flag with its dashes. The key in the file has the same name without them.
        setting: &'static str,
        /// The invalid value, or the invalid part of it. It may differ from the user's text, for example in white space
        /// or host bits.
        value: String,
        /// What is wrong with the value, and advice.
        reason: String,
    },
    /// Neither `--manifests` nor `--kubeconfig` is given, and the agent does not run in a Pod.
    #[error(
        "no source of Services: give `--manifests DIR`, a directory of YAML manifests, or `--kubeconfig FILE` for a \
         Kubernetes API server; only in a Pod (where {IN_CLUSTER} is set) its API server is the default"
    )]
    NoSource,
    /// Both `--manifests` and `--kubeconfig` are given.
    #[error("two sources of Services, --manifests {} and --kubeconfig {}: give one of them", manifests.display(), kubeconfig.display())]
    TwoSources {
        /// Directory that `--manifests` gives.
        manifests: PathBuf,
        /// File that `--kubeconfig` gives.
        kubeconfig: PathBuf,
    },
    /// The host name, which is the default of `--node-name`, cannot be read.
    #[error("cannot find the host name, which is the default of --node-name: give --node-name NAME")]
    NoHostName(#[source] std::io::Error),
}

/// Makes the error for a setting with an invalid value.
pub(crate) fn refused(setting: &'static str, value: impl ToString, reason: impl Into<String>) -> ConfigError {
    ConfigError::BadValue { setting, value: value.to_string(), reason: reason.into() }
}
