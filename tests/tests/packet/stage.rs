//! The addresses and devices of the cases. Addresses are those for documentation (RFC 5737, RFC 3849).

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Mutex, PoisonError},
};

use bytemuck::Zeroable as _;
use lb_common::{Address, Settings};

use super::testbed::{Device, Testbed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn pick(self, v4: &str, v6: &str) -> SocketAddr {
        match self {
            Self::V4 => v4.parse().unwrap(),
            Self::V6 => v6.parse().unwrap(),
        }
    }

    pub(crate) fn client(self) -> SocketAddr {
        self.pick("192.0.2.10:40000", "[2001:db8:c::10]:40000")
    }

    pub(crate) fn vip(self) -> SocketAddr {
        self.pick("203.0.113.1:80", "[2001:db8:f::1]:80")
    }

    /// The address of a second Service.
    pub(crate) fn other_vip(self) -> SocketAddr {
        self.pick("203.0.113.2:443", "[2001:db8:f::2]:443")
    }

    /// The address of a Service without backends.
    pub(crate) fn empty_vip(self) -> SocketAddr {
        self.pick("203.0.113.3:80", "[2001:db8:f::3]:80")
    }

    pub(crate) fn backend(self) -> SocketAddr {
        self.pick("198.51.100.1:8080", "[2001:db8:b::1]:8080")
    }

    pub(crate) fn other_backend(self) -> SocketAddr {
        self.pick("198.51.100.2:9090", "[2001:db8:b::2]:9090")
    }

    /// The node's own address.
    pub(crate) fn node(self) -> IpAddr {
        self.pick("198.51.100.253:0", "[2001:db8:b::fd]:0").ip()
    }

    /// A router beyond the node, the source of ICMP errors.
    pub(crate) fn router(self) -> IpAddr {
        self.pick("198.51.100.254:0", "[2001:db8:b::fe]:0").ip()
    }

    /// Another host, in the client's network.
    pub(crate) fn stranger(self) -> SocketAddr {
        self.pick("192.0.2.99:53", "[2001:db8:c::99]:53")
    }
}

/// Devices for tests in which a program changes the length of the packet. None has CHECKSUM_COMPLETE: when a program
/// changes the length of a frame, the kernel discards the frame's sum, but the test run verifies it nevertheless.
pub(crate) const RESIZED: [Device; 2] = [Device::Ethernet, Device::Bare];

/// First source port of masqueraded clients.
pub(crate) const FIRST_PORT: u16 = 10_000;
/// Number of source ports of masqueraded clients, unless a test needs fewer.
pub(crate) const PORTS: u16 = 20_000;

/// The settings of a node that masquerades with `ports` source ports of [`Family::node`].
pub(crate) fn masquerade_settings(ports: u16) -> Settings {
    Settings {
        source_v4: Address::from(Family::V4.node()),
        source_v6: Address::from(Family::V6.node()),
        first_port: FIRST_PORT,
        ports,
        ..Settings::zeroed()
    }
}

/// The testbed that most cases share, because loading the programs takes a second. Every case first clears the maps,
/// including the entries that a failed case has left.
pub(crate) static TESTBED: Mutex<Option<Testbed>> = Mutex::new(None);

/// Runs `test` for both families and every kind of device, each with empty maps.
pub(crate) fn each(case: &str, test: impl Fn(&mut Testbed, Family)) {
    each_on(&Device::ALL, case, test);
}

/// Like [`each_on`], but runs `test` a second time with programs that cannot read `sk_buff::ip_summed`, as on an old
/// kernel.
pub(crate) fn each_kernel(case: &str, devices: &[Device], test: impl Fn(&mut Testbed, Family)) {
    each_on(devices, case, &test);
    static OLD: Mutex<Option<Testbed>> = Mutex::new(None);
    let mut bed = OLD.lock().unwrap_or_else(PoisonError::into_inner);
    run_on(bed.get_or_insert_with(Testbed::unlinked), devices, &format!("{case}, old kernel"), test);
}

/// Like [`each`], on devices with an Ethernet header.
pub(crate) fn each_ethernet(case: &str, test: impl Fn(&mut Testbed, Family)) {
    each_on(&[Device::Ethernet, Device::EthernetWithSum], case, test);
}

/// Like [`each`], on these kinds of devices.
pub(crate) fn each_on(devices: &[Device], case: &str, test: impl Fn(&mut Testbed, Family)) {
    let mut bed = TESTBED.lock().unwrap_or_else(PoisonError::into_inner);
    run_on(bed.get_or_insert_with(Testbed::new), devices, case, test);
}

fn run_on(bed: &mut Testbed, devices: &[Device], case: &str, test: impl Fn(&mut Testbed, Family)) {
    for family in Family::BOTH {
        for &device in devices {
            if bed.start(&format!("{case}, {family:?}, {device:?}"), device) {
                test(bed, family);
            }
        }
    }
}
