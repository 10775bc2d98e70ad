//! `cargo xtask package --guest`: the package in fresh Debians with systemd, emulated by qemu, each beside another
//! host.
//!
//! ```text
//! tutorial  the commands of docs/standalone.md     image    the root file system of a guest
//! life      installation, faults, upgrade, removal shell    commands in a guest
//!                                                  network  the wire, and the other host at its end
//! ```

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use lb_tests::cleanup;

use crate::setup;
use crate::user::is_root;
use crate::vm::kernel::{self, Kernel};

mod image;
mod life;
mod network;
mod shell;
mod tutorial;

use self::network::OtherHost;
use self::shell::Shell;

/// The guests' Debian release.
const DEBIAN: &str = "bookworm";
/// The version of the guests' kernel.
const KERNEL: &str = "6.1";
/// Programs that build and run the guests, and those that the other host runs, with their packages.
const TOOLS: [(&str, &str); 5] = [
    ("mmdebstrap", "mmdebstrap"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("depmod", "kmod"),
    ("curl", "curl"),
    ("dig", "bind9-dnsutils"),
];
/// Path of the package in a guest.
const PACKAGE: &str = concat!("/root/lb-agent_", env!("CARGO_PKG_VERSION"), "_amd64.deb");
/// A sequence of commands and checks in a guest.
type Play = fn(&mut Shell, &OtherHost) -> anyhow::Result<()>;
/// The play of each guest, with its name.
const PLAYS: [(&str, Play); 2] = [("tutorial", tutorial::play), ("life", life::play)];

/// Boots a fresh guest for each play.
pub(super) fn run(package: &Path, folder: &Path) -> anyhow::Result<()> {
    ensure!(is_root()?, "the guests' network card needs root");
    setup::install(&TOOLS)?;
    cleanup::on_interrupt();
    let kernel = kernel::find(KERNEL)?;
    step("building the root file system of Debian", DEBIAN);
    let image = folder.join("guest.cpio");
    image::write(&image, DEBIAN, &kernel, package)?;
    for (name, play) in PLAYS {
        let folder = folder.join(name);
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        step("booting Debian for the play", name);
        boot_and_play(&kernel, &image, &folder, play).with_context(|| {
            format!("{name}: the guest's console is in {}", folder.join("console.log").display())
        })?;
    }
    Ok(())
}

fn boot_and_play(kernel: &Kernel, image: &Path, folder: &Path, play: Play) -> anyhow::Result<()> {
    let other_host = OtherHost::create(folder)?;
    let mut guest = Shell::boot(kernel, image, folder, &other_host)?;
    guest.run("systemctl is-system-running --wait")?;
    guest.run(network::GUEST)?;
    play(&mut guest, &other_host)?;
    guest.power_off()
}

fn step(what: &str, which: &str) {
    eprintln!("package: {what} {which}");
}

fn done(what: &str) {
    eprintln!("package: ok: {what}");
}
