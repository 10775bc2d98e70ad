//! The guest, and a shell in it: commands and their output go through a serial port, which qemu connects to a Unix
//! socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use lb_tests::daemon::Daemon;

use super::network::{self, OtherHost};
use crate::vm::kernel::Kernel;
use crate::vm::qemu;

/// The word that begins the line after the output of each command. The exit code of the command follows in this line.
const END: &str = "@exit";
/// How long a command may take, and how long the guest may take to boot or to power off.
const LIMIT: Duration = Duration::from_secs(600);

/// The shell of a running guest.
pub(super) struct Shell {
    guest: Daemon,
    output: BufReader<UnixStream>,
}

impl Shell {
    /// Boots the guest and waits for its shell. `folder` gets the console's output.
    pub(super) fn boot(
        kernel: &Kernel,
        image: &Path,
        folder: &Path,
        other_host: &OtherHost,
    ) -> anyhow::Result<Self> {
        let socket = folder.join("shell.sock");
        let mut command = other_host.command(qemu::PROGRAM);
        let parameters = "net.ifnames=0 systemd.show_status=1";
        let console = folder.join("console.log");
        qemu::configure(&mut command, kernel, qemu::accelerator(kernel)?, &console, parameters, Some(image));
        command.args(network::arguments());
        command.arg("-serial").arg(format!("unix:{},server=on,wait=off", socket.display()));
        let mut guest = qemu::start(command)?;
        let stream = connect(&mut guest, &socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut shell = Self { guest, output: BufReader::new(stream) };
        shell.read().context("the guest's shell has not started")?;
        Ok(shell)
    }

    /// Runs a command; fails if the command fails.
    pub(super) fn run(&mut self, command: &str) -> anyhow::Result<()> {
        self.output(command).map(drop)
    }

    /// The output of a command, without white space around it; fails if the command does.
    pub(super) fn output(&mut self, command: &str) -> anyhow::Result<String> {
        let (code, output) = self.execute(command).with_context(|| format!("in the guest: {command}"))?;
        ensure!(code == "0", "in the guest, `{command}` ends with {code}:\n{output}");
        Ok(output)
    }

    /// Repeats a command until its output is the expected one.
    pub(super) fn wait_for(&mut self, command: &str, expected: &str, limit: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let (_, output) = self.execute(command)?;
            if output == expected {
                return Ok(());
            }
            ensure!(start.elapsed() < limit, "in the guest, `{command}` prints {output:?}, not {expected:?}");
            sleep(Duration::from_secs(1));
        }
    }

    /// Writes a file in the guest, and creates its folder.
    pub(super) fn write(&mut self, path: &str, content: &str) -> anyhow::Result<()> {
        let folder = Path::new(path).parent().unwrap_or(Path::new("/")).display();
        self.run(&format!("mkdir -p {folder} && cat > {path} <<'END'\n{content}END"))
    }

    /// Runs a command; returns its exit code and its output.
    fn execute(&mut self, command: &str) -> anyhow::Result<(String, String)> {
        let line = format!("{{ {command}\n}} </dev/null 2>&1; printf '\\n{END} %s\\n' $?\n");
        self.output.get_mut().write_all(line.as_bytes())?;
        self.read()
    }

    /// Reads a command's output up to the line that begins with [`END`]; returns the exit code in that line, and the
    /// output before it. The guest also prints such a line when it starts the shell.
    fn read(&mut self) -> anyhow::Result<(String, String)> {
        let mut output = String::new();
        loop {
            let mut line = String::new();
            ensure!(self.output.read_line(&mut line)? > 0, "the guest has ended");
            if let Some(code) = line.strip_prefix(END) {
                return Ok((code.trim().to_owned(), output.trim().to_owned()));
            }
            output.push_str(&line);
        }
    }

    /// Ends the guest, and waits until it has ended.
    pub(super) fn power_off(mut self) -> anyhow::Result<()> {
        // The shell may end before it can say that the command has succeeded.
        self.output.get_mut().write_all(b"systemctl poweroff\n")?;
        let start = Instant::now();
        while self.guest.is_running()? {
            ensure!(start.elapsed() < LIMIT, "the guest does not power off");
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

/// Connects to the socket, which qemu creates when it starts.
fn connect(guest: &mut Daemon, socket: &Path) -> anyhow::Result<UnixStream> {
    let start = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() > Duration::from_secs(30) => {
                return Err(error).with_context(|| format!("cannot connect to {}", socket.display()));
            }
            Err(_) if !guest.is_running()? => bail!("{} has ended at once", qemu::PROGRAM),
            Err(_) => sleep(Duration::from_millis(100)),
        }
    }
}
