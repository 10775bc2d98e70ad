//! The container of the agent's Pod, without a container runtime: its mounts, environment and capabilities, as a
//! DaemonSet of `deploy/` asks for them; and the first process of a container.

use std::{
    ffi::OsStr,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::{daemon::Daemon, netns::Netns, wait_for};

/// How long to wait until a started program has a process.
const PATIENCE: Duration = Duration::from_secs(30);

/// The first container of a DaemonSet's Pods. In the container's file system everything is read-only except the
/// volumes; the executables are those of this machine.
#[derive(Clone, Debug)]
pub struct Container {
    pod: Value,
}

impl Container {
    /// The container that this DaemonSet asks for.
    pub fn new(daemon_set: &Value) -> Self {
        Self { pod: daemon_set["spec"]["template"]["spec"].clone() }
    }

    fn spec(&self) -> &Value {
        &self.pod["containers"][0]
    }

    /// The arguments with which the container starts its executable.
    pub fn arguments(&self) -> Vec<&str> {
        texts(&self.spec()["args"])
    }

    /// The command of a probe, without the path of the executable.
    pub fn probe(&self, name: &str) -> Vec<&str> {
        texts(&self.spec()[name]["exec"]["command"]).split_off(1)
    }

    /// The environment variables on a node with this name.
    ///
    /// # Errors
    /// A variable has a source that is not the name of the node.
    pub fn variables(&self, node: &str) -> Result<Vec<(&str, String)>> {
        let mut variables = Vec::new();
        for variable in self.spec()["env"].as_array().into_iter().flatten() {
            let name = variable["name"].as_str().context("a variable without a name")?;
            let value = match variable["value"].as_str() {
                Some(value) => value,
                None if variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName" => node,
                None => bail!("the variable {name} has an unknown source"),
            };
            variables.push((name, value.to_owned()));
        }
        Ok(variables)
    }

    /// The value of an environment variable that does not depend on the node.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let variables = self.spec()["env"].as_array()?;
        variables.iter().find(|variable| variable["name"] == name)?["value"].as_str()
    }

    /// Names of the capabilities, in lower case.
    pub fn capabilities(&self) -> Vec<String> {
        let added = texts(&self.spec()["securityContext"]["capabilities"]["add"]);
        added.into_iter().map(str::to_lowercase).collect()
    }

    /// Start of a command that runs the appended command in a new mount namespace, with the container's mounts and
    /// capabilities. `volumes` has the name and the folder of each volume that the node or the cluster provides. A
    /// ConfigMap that is missing in `volumes` is not mounted.
    ///
    /// # Errors
    /// The root file system is writable, or `volumes` lacks a folder of the node.
    pub fn starter(&self, volumes: &[(&str, PathBuf)]) -> Result<Vec<String>> {
        let script = self.mounts(volumes)?;
        let unshare = ["unshare", "--mount", "sh", "-c", &script, "container"].map(str::to_owned);
        Ok(unshare.into_iter().chain(setpriv(&self.capabilities())).collect())
    }

    /// A command that runs `starter`, such as [`setpriv`], with the arguments that the caller appends. As with `kubectl
    /// exec`, `starter` runs in the mount namespace and the working directory of a running container. `pid` is the id
    /// of the container's first process, and `netns` is the node's network namespace.
    pub fn exec(&self, netns: &Netns, pid: u32, starter: &[String]) -> Command {
        let dir = self.spec()["workingDir"].as_str().unwrap_or("/");
        let mut command = netns.command("nsenter");
        command.args(["--mount", "--target", &pid.to_string(), "env", &format!("--chdir={dir}")]);
        command.args(starter);
        command
    }

    /// A shell script that creates the container's mounts in the mount namespace in which the script runs, and then
    /// runs its arguments. The script tolerates mount points that disappear meanwhile: if another test removes the
    /// folder of a mount point, the kernel removes the mount from every namespace.
    fn mounts(&self, volumes: &[(&str, PathBuf)]) -> Result<String> {
        if self.spec()["securityContext"]["readOnlyRootFilesystem"] != true {
            bail!("the root file system is writable");
        }
        let mut mounts: Vec<&Value> = self.spec()["volumeMounts"].as_array().into_iter().flatten().collect();
        // The mount of a folder comes before the mounts inside of this folder.
        mounts.sort_by_key(|mount| mount["mountPath"].as_str().unwrap_or_default().split('/').count());
        let (mut points, mut filled) = (String::new(), String::new());
        for mount in mounts {
            let name = mount["name"].as_str().context("a mount without a name")?;
            let point = mount["mountPath"].as_str().context("a mount without a path")?;
            let volume = self.pod["volumes"].as_array().into_iter().flatten();
            let volume = volume.clone().find(|volume| volume["name"] == name).context("no such volume")?;
            let folder = volumes.iter().find(|(known, _)| *known == name).map(|(_, folder)| folder);
            if folder.is_none() && volume.get("configMap").is_some() {
                continue;
            }
            // Creates mount points that the image does not have, as container runtimes do.
            writeln!(points, "{}mkdir -p {point}", replaced(point))?;
            writeln!(filled, "mkdir -p {point}")?;
            match folder {
                Some(folder) => writeln!(filled, "mount --bind {} {point}", folder.display())?,
                None => bail!("the node has no folder for the volume {volume}"),
            }
            let mode = if mount["readOnly"] == true { "ro" } else { "rw" };
            writeln!(filled, "mount -o remount,bind,{mode} {point}")?;
        }
        Ok(format!(
            "set -eu\n\
             mount --make-rprivate /\n\
             mount -t tmpfs image /run\n\
             {points}\
             mount --bind /proc/sys /proc/sys\n\
             for point in $(cut -d ' ' -f 5 /proc/self/mountinfo); do\n\
               case $point in\n\
                 /proc|/dev|/dev/*|/run/*) ;;\n\
                 *) mount -o remount,bind,ro $point || if mountpoint -q $point; then exit 1; fi ;;\n\
               esac\n\
             done\n\
             {filled}\
             exec \"$@\"\n"
        ))
    }
}

/// A process with the id 1 in a PID namespace of its own, like the first process of a container. Of the signals that
/// such a process does not handle, only SIGKILL ends it. Dropping this kills the process.
#[derive(Debug)]
pub struct FirstProcess {
    /// The program `unshare`, which ends when the process ends, with the status of the process.
    parent: Daemon,
    pid: Pid,
}

impl FirstProcess {
    /// Starts a program in a network namespace, with its standard output and standard error in the file `log`.
    ///
    /// # Errors
    /// The file cannot be written, or the program cannot be started.
    pub fn start(
        netns: &Netns,
        program: impl AsRef<OsStr>,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        log: &Path,
    ) -> Result<Self> {
        let mut command = netns.command("unshare");
        command.args(["--pid", "--fork", "--kill-child"]).arg(program).args(arguments);
        let parent = Daemon::start_with_log(&mut command, log)?;
        let children = format!("/proc/{0}/task/{0}/children", parent.id());
        let child = || fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse::<i32>().ok();
        let pid = wait_for(PATIENCE, child).map(Pid::from_raw);
        let pid = pid.with_context(|| format!("{command:?} has started no process"))?;
        Ok(Self { parent, pid })
    }

    /// Sends a signal to the process, from outside of its namespace.
    ///
    /// # Errors
    /// The process has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid, signal).with_context(|| format!("sending {signal}"))
    }

    /// The status with which the process has ended; `None` while it runs.
    ///
    /// # Errors
    /// The status cannot be read.
    pub fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.parent.status()
    }
}

/// A command that mounts an empty file system over the parent folder of a mount point, so that the mount point can be
/// created there without a trace on this machine. Empty for a mount point below `/run`, over which the script always
/// mounts an empty file system.
fn replaced(point: &str) -> String {
    match Path::new(point).parent() {
        Some(parent) if !parent.starts_with("/run") && !parent.starts_with("/var/run") => {
            format!("mount -t tmpfs image {}\n", parent.display())
        }
        _ => String::new(),
    }
}

/// Start of a command that runs the appended command with only these capabilities, as container runtimes do.
pub fn setpriv(capabilities: &[String]) -> Vec<String> {
    let kept: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    ["setpriv", "--no-new-privs", "--inh-caps=-all"]
        .into_iter()
        .map(str::to_owned)
        .chain([format!("--bounding-set=-all{kept}")])
        .collect()
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}
