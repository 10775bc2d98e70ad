//! `lb-agent service env` and `lb-agent exec`: the environment variables by which processes find Services.

use std::{
    env, io,
    os::unix::process::CommandExt as _,
    process::{self, Command},
};

use super::output;
use crate::{
    cli::{EnvironmentArgs, EnvironmentFormat, ExecArgs},
    config::KernelPaths,
    daemon::environment::{self, Variables},
};

/// Exit code of `exec` if the program exists but cannot be started; shells use the same code.
const CANNOT_RUN: i32 = 126;
/// Exit code of `exec` if there is no such program; shells use the same code.
const NOT_FOUND: i32 = 127;

/// Prints the variables of a namespace.
///
/// # Errors
/// No agent answers, the agent has not read all Services yet, or standard output cannot be written.
pub(super) fn print(paths: &KernelPaths, args: &EnvironmentArgs) -> anyhow::Result<()> {
    let variables = ask(paths, &args.namespace)?;
    output::print(&format(&variables, args.format)?)
}

/// Runs `lb-agent exec`: replaces this process by the program. If the program cannot be started, ends this process with
/// the exit code that a shell would use.
///
/// # Errors
/// No agent answers, or the agent has not read all Services yet.
pub fn exec(paths: &KernelPaths, args: &ExecArgs) -> anyhow::Result<()> {
    let Variables { variables, .. } = ask(paths, &args.namespace)?;
    let (program, arguments) = args.command.split_first().expect("clap requires a program");
    let new = variables.into_iter().filter(|(name, _)| env::var_os(name).is_none());
    let error = Command::new(program).args(arguments).envs(new).exec();
    eprintln!("error: cannot run {}: {error}", program.display());
    process::exit(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN });
}

/// Requests the variables of a namespace from the agent; prints a warning for each variable that two Services define.
fn ask(paths: &KernelPaths, namespace: &str) -> anyhow::Result<Variables> {
    let variables = environment::ask(&paths.bpffs, namespace)?;
    for collision in &variables.collisions {
        eprintln!("warning: {collision}");
    }
    Ok(variables)
}

/// The variables as text in this format. Values need no escaping: they contain no quotes, backslashes or dollar signs.
fn format(found: &Variables, format: EnvironmentFormat) -> serde_json::Result<String> {
    let lines = |line: fn(&str, &str) -> String| -> String {
        found.variables.iter().map(|(name, value)| line(name, value) + "\n").collect()
    };
    Ok(match format {
        EnvironmentFormat::Shell => lines(|name, value| identifier(name, format!("export {name}='{value}'"))),
        EnvironmentFormat::Docker => lines(|name, value| format!("{name}={value}")),
        EnvironmentFormat::Systemd => lines(|name, value| identifier(name, format!("{name}=\"{value}\""))),
        EnvironmentFormat::Json => {
            let object = found.variables.iter().map(|(name, value)| (name.clone(), value.clone().into()));
            serde_json::to_string_pretty(&serde_json::Value::Object(object.collect()))? + "\n"
        }
    })
}

/// The assignment `line`; a comment in its place if `name` begins with a digit, because shells and systemd accept no
/// such variable. (A name begins with a digit if the name of its Service does.)
fn identifier(name: &str, line: String) -> String {
    if name.starts_with(|letter: char| letter.is_ascii_digit()) {
        format!("# {name} begins with a digit, so it is no name of a variable here")
    } else {
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Variables {
        let variables = [("WEB_PORT", "tcp://[2001:db8::1]:80"), ("7ZIP_SERVICE_HOST", "10.0.0.1")];
        Variables {
            is_complete: true,
            variables: variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            collisions: Vec::new(),
        }
    }

    #[test]
    fn each_format_has_its_syntax_and_leaves_out_names_that_it_refuses() {
        let comment = "# 7ZIP_SERVICE_HOST begins with a digit, so it is no name of a variable here\n";
        let text = |kind| format(&found(), kind).unwrap();
        assert_eq!(
            text(EnvironmentFormat::Shell),
            format!("export WEB_PORT='tcp://[2001:db8::1]:80'\n{comment}")
        );
        assert_eq!(
            text(EnvironmentFormat::Systemd),
            format!("WEB_PORT=\"tcp://[2001:db8::1]:80\"\n{comment}")
        );
        assert_eq!(
            text(EnvironmentFormat::Docker),
            "WEB_PORT=tcp://[2001:db8::1]:80\n7ZIP_SERVICE_HOST=10.0.0.1\n"
        );
        let json =
            serde_json::json!({ "WEB_PORT": "tcp://[2001:db8::1]:80", "7ZIP_SERVICE_HOST": "10.0.0.1" });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text(EnvironmentFormat::Json)).unwrap(), json);
    }
}
