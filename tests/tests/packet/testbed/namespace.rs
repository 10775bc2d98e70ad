//! The network namespace of the test runs, whose loopback device stands for the device of the packet.

use std::{cell::Cell, fs, os::unix::fs::MetadataExt as _, process::Command};

use nix::sched::{CloneFlags, unshare};

/// [`super::super::packets::NODE`] as `ip` writes it: the MAC address of the loopback device.
///
/// `BPF_PROG_TEST_RUN` compares the destination of a frame with the MAC address of the device, as drivers do, and so
/// decides whether the frame is for this host (`skb->pkt_type`).
const NODE: &str = "00:00:5e:00:53:02";

thread_local! {
    /// The inode number of this thread's network namespace, once its loopback device has the MAC address [`NODE`].
    static PREPARED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Gives the loopback device of this thread's namespace the MAC address of the node. If the thread is still in the
/// namespace of the process, first moves the thread to a new namespace.
pub(super) fn prepare() {
    let mut here = inode("thread-self");
    if PREPARED.get() == Some(here) {
        return;
    }
    if here == inode("self") {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        here = inode("thread-self");
    }
    let found = Command::new("ip").args(["link", "show", "lo"]).output().unwrap();
    if !String::from_utf8_lossy(&found.stdout).contains(NODE) {
        let set = Command::new("ip").args(["link", "set", "lo", "address", NODE]).status().unwrap();
        assert!(set.success(), "the loopback device gets no MAC address");
    }
    PREPARED.set(Some(here));
}

/// The inode number of the network namespace of this thread (`thread-self`) or of its process (`self`).
fn inode(process: &str) -> u64 {
    fs::metadata(format!("/proc/{process}/ns/net")).unwrap().ino()
}
