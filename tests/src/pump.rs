//! Links two namespaces by two TUN or TAP devices and a thread that copies frames. With TUN, packets have no Ethernet
//! header, which no veth can do. With TAP, the thread inserts an 802.1Q header into the frames to the second end, so
//! that no end needs a VLAN device.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::OpenOptionsExt as _,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, spawn},
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use crate::netns::Netns;

nix::ioctl_write_ptr_bad!(
    /// The ioctl that creates a TUN or TAP device and attaches a file to it.
    set_interface,
    libc::TUNSETIFF,
    libc::ifreq
);

/// The format of frames on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// TUN devices: packets begin with the IP header.
    Ip,
    /// TAP devices: Ethernet frames. Those to the second end get an 802.1Q header with this tag control information.
    Tagged(u16),
}

/// The thread that copies frames of a link. Dropping this stops the thread and removes the devices.
#[derive(Debug)]
pub struct Pump {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

/// Creates a device in each of the two namespaces, with these names, and links them.
pub fn connect(first: (&Netns, &str), second: (&Netns, &str), layer: Layer) -> Result<Pump> {
    let [a, b] = [first, second].map(|(netns, name)| {
        netns
            .run(|| open_device(name, layer))
            .with_context(|| format!("making device {name} in namespace {} from /dev/net/tun", netns.name()))
    });
    let (mut a, mut b) = (a?, b?);
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let thread = spawn(move || {
        while !stopping.load(Ordering::Relaxed) {
            // Ignores errors: a device that is full or down drops frames, as any link does.
            let _lost = carry(&mut a, &mut b, layer);
        }
    });
    Ok(Pump { stop, thread: Some(thread) })
}

fn open_device(name: &str, layer: Layer) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    let mode = match layer {
        Layer::Ip => libc::IFF_TUN,
        Layer::Tagged(_) => libc::IFF_TAP,
    };
    // SAFETY: all of `ifreq` is integers, byte arrays and pointers that the kernel does not read here; zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(mode | libc::IFF_NO_PI).map_err(io::Error::other)?;
    // SAFETY: `file` is /dev/net/tun and `request` an `ifreq` with a NUL-terminated name and with flags.
    unsafe { set_interface(file.as_raw_fd(), &raw const request) }?;
    Ok(file)
}

/// Waits briefly for frames, and copies all that have arrived from each device to the other.
fn carry(a: &mut File, b: &mut File, layer: Layer) -> io::Result<()> {
    let mut waiting = [PollFd::new(a.as_fd(), PollFlags::POLLIN), PollFd::new(b.as_fd(), PollFlags::POLLIN)];
    poll(&mut waiting, PollTimeout::from(20_u8))?;
    let mut frame = [0; 65_536];
    while let Some(len) = read_frame(a, &mut frame)? {
        match layer {
            Layer::Ip => b.write_all(&frame[..len])?,
            Layer::Tagged(tag) => b.write_all(&tagged(&frame[..len], tag))?,
        }
    }
    while let Some(len) = read_frame(b, &mut frame)? {
        a.write_all(&frame[..len])?;
    }
    Ok(())
}

fn read_frame(from: &mut File, frame: &mut [u8]) -> io::Result<Option<usize>> {
    match from.read(frame) {
        Ok(len) => Ok(Some(len)),
        Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The frame with an 802.1Q header inserted between the addresses and the type.
fn tagged(frame: &[u8], tag: u16) -> Vec<u8> {
    let (addresses, rest) = frame.split_at(12.min(frame.len()));
    [addresses, &[0x81, 0x00], &tag.to_be_bytes(), rest].concat()
}
