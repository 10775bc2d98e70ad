//! Fuzzes the reader of configuration files, both in our format and as kube-proxy's KubeProxyConfiguration: the reader
//! never panics, reading a text twice gives the same configuration or the same error, and an error names the file, or
//! the setting whose value is invalid.
#![no_main]

use std::{fs::File, io::Write as _, os::fd::AsRawFd as _, path::PathBuf};

use lb_agent::{
    cli::{KernelArgs, RunArgs},
    config::{Config, ConfigError},
};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

fuzz_target!(|text: &[u8]| {
    let file = file(text);
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    match (read(&path), read(&path)) {
        (Ok(config), Ok(again)) => assert_eq!(config, again),
        (Err(error), Err(again)) => {
            let message = error.to_string();
            assert_eq!(message, again.to_string());
            let names_setting = matches!(error, ConfigError::BadValue { .. }) && message.starts_with("--");
            assert!(names_setting || message.contains(&path.display().to_string()), "{message}");
        }
        (first, second) => panic!("{first:?}, then {second:?}"),
    }
});

/// An anonymous file in memory with this content.
fn file(text: &[u8]) -> File {
    let mut file = File::from(memfd_create("config", MemfdFlags::CLOEXEC).expect("a file in memory"));
    file.write_all(text).expect("memory");
    file
}

/// Reads the file as `lb-agent run --config FILE --manifests /` does. (The flag overrides a folder that the file names:
/// the target opens no path of the fuzzer's choice.)
fn read(path: &std::path::Path) -> Result<Config, ConfigError> {
    let kernel = KernelArgs { config: Some(path.to_owned()), ..KernelArgs::default() };
    Config::new(kernel, RunArgs { manifests: Some("/".into()), ..RunArgs::default() })
}
