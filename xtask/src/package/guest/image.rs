//! The root file system of the guest: a minimal Debian, its kernel's modules, the package, and a shell at the second
//! serial port. All files belong to root, no folder is writable for others, and no program is setuid.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use super::PACKAGE;
use crate::process;
use crate::vm::kernel::Kernel;
use crate::vm::tree::Tree;

/// Packages beside the essential ones: systemd as process 1, the programs that load drivers, `ip`, a web server, and an
/// HTTP client.
const PACKAGES: &str = "systemd-sysv,udev,kmod,iproute2,busybox,curl";
/// Folders of Debian's root file system that the guest does not need, or that hold device files.
const LEFT_OUT: [&str; 5] =
    ["dev", "usr/share/doc", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"];
/// The script that is process 1 at first. systemd gives services a root file system of their own by `pivot_root`, which
/// the kernel refuses in an initramfs. So the script copies Debian to a tmpfs.
const INIT: &str = "\
#!/bin/sh
mkdir /new
mount -t tmpfs -o size=1g,mode=755 root /new
for entry in /*; do
    [ \"$entry\" = /new ] || cp -ax \"$entry\" /new
done
exec switch_root /new /sbin/init
";
/// The unit that runs the commands from the second serial port. It first prints the line that tells
/// [`Shell`](super::shell::Shell) that the shell has started. Standard error is no terminal, so the shell prints no
/// prompt.
const SHELL: &str = "\
[Service]
ExecStartPre=/bin/stty --file=/dev/ttyS1 -echo -onlcr
ExecStart=/bin/sh -c 'echo; echo @exit 0; exec /bin/sh'
StandardInput=tty
StandardOutput=tty
StandardError=journal
TTYPath=/dev/ttyS1
KillSignal=SIGKILL
";

/// Writes the initramfs of a Debian `release` with this kernel and package.
pub(super) fn write(image: &Path, release: &str, kernel: &Kernel, package: &Path) -> anyhow::Result<()> {
    let root = image.with_extension("root");
    bootstrap(release, &root)?;
    let mut tree = Tree::default();
    tree.copy_below(Path::new("/"), &root)?;
    let modules = Path::new("/usr/lib/modules").join(&kernel.release);
    tree.copy_below(&modules, &kernel.modules)?;
    tree.file(PACKAGE, package)?;
    tree.text("/init", INIT);
    tree.folder("/dev");
    tree.text("/etc/systemd/system/console-shell.service", SHELL);
    tree.link(
        "/etc/systemd/system/multi-user.target.wants/console-shell.service",
        "../console-shell.service",
    );
    tree.write(image)?;
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

/// Installs a minimal Debian in a new folder.
fn bootstrap(release: &str, root: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase", &format!("--include={PACKAGES}"), release]).arg(root);
    process::run(command)?;
    for folder in LEFT_OUT.map(|path| root.join(path)) {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}
