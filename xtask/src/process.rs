//! Child processes. Their output goes to stderr, since stdout is for results (`cargo xtask demo --json`).

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Runs a command to its end. An error contains the command line.
pub(crate) fn run(mut command: Command) -> anyhow::Result<()> {
    let line = command_line(&command);
    eprintln!("$ {line}");
    let status = command.stdout(io::stderr()).status().with_context(|| format!("cannot start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed: {status}");
    Ok(())
}

/// The cargo that runs xtask, in the root of the workspace. It does not inherit the variables that describe xtask: the
/// build script of `ring` reads these variables. If they changed between a build by xtask and a build from a shell,
/// cargo would compile `ring` and the agent again.
pub(crate) fn cargo<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(ebpf_build::workspace_root()).args(args);
    remove_variables(&mut command, describes_package);
    command
}

/// Removes from a command's environment the variables of this process for which `removed` is true.
pub(crate) fn remove_variables(command: &mut Command, removed: fn(&str) -> bool) {
    for (name, _) in env::vars_os().filter(|(name, _)| removed(&name.to_string_lossy())) {
        command.env_remove(name);
    }
}

/// Whether `cargo run` sets this variable to describe the package that it runs.
pub(crate) fn describes_package(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// Whether `PATH` or the system folders contain a program of this name.
pub(crate) fn is_installed(program: &str) -> bool {
    find(program).is_some()
}

/// The path of a program, from `PATH` or the system folders (`sbin`).
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// The command as typed in a shell.
pub(crate) fn command_line(command: &Command) -> String {
    let settings = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let settings = settings.map(|(name, value)| format!("{}={}", name.display(), value.display()));
    // Prints only the file name, because cargo's whole path is long and does not matter.
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words =
        [program].into_iter().chain(command.get_args()).map(OsStr::display).map(|word| word.to_string());
    settings.chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_inherits_no_description_of_xtask() {
        let removed: Vec<_> =
            cargo(["build"]).get_envs().map(|(name, value)| (name.to_owned(), value.is_some())).collect();
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
            assert!(env::var_os(name).is_some(), "cargo sets {name} for this test");
            assert!(removed.contains(&(name.into(), false)), "{name} is inherited");
        }
        assert!(removed.iter().all(|(name, _)| name != "PATH"), "{removed:?}");
    }

    #[test]
    fn error_has_the_command_line() {
        let mut command = Command::new("/bin/false");
        command.arg("--now").env("SETTING", "1");
        let error = run(command).map_err(|error| error.to_string());
        assert_eq!(error, Err("`SETTING=1 false --now` failed: exit status: 1".to_owned()));
    }

    #[test]
    fn installed_programs_are_found() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program"));
    }
}
