//! The network cards of a guest: pairs of virtio cards. A bridge on this machine connects the two cards of a pair.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::Context as _;
use lb_tests::cleanup;
use lb_tests::netns::{Netns, unique_prefix};
use lb_tests::virtio::{END_NAMES, MTU, PAIRS, Pair, QUEUES};

/// The host's side of the cards: a network namespace with a TAP device for each card and a bridge for each pair.
/// Dropping this value removes all of it.
pub(super) struct Wires(Netns);

impl Wires {
    /// Creates the namespace, the TAP devices, and the bridges that connect the cards of each pair.
    pub(super) fn create() -> anyhow::Result<Self> {
        cleanup::on_interrupt();
        let netns = Netns::create(&unique_prefix()).context("the guest's network cards need root")?;
        netns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut commands = String::new();
        for pair in PAIRS {
            writeln!(commands, "link add {} type bridge", bridge(pair))?;
            for tap in taps(pair) {
                // The `-netdev` argument does not repeat `vnet_hdr`: qemu enables it on a TAP device that was created
                // with it.
                writeln!(commands, "tuntap add dev {tap} mode tap multi_queue vnet_hdr")?;
                writeln!(commands, "link set {tap} mtu {MTU} master {} up", bridge(pair))?;
            }
            writeln!(commands, "link set {} up", bridge(pair))?;
        }
        netns.ip(&commands)?;
        Ok(Self(netns))
    }

    /// A command in this network namespace.
    pub(super) fn command(&self, program: &str) -> Command {
        self.0.command(program)
    }
}

fn bridge(pair: Pair) -> String {
    format!("br{}", pair.number)
}

fn taps(pair: Pair) -> [String; 2] {
    END_NAMES.map(|end| format!("tap{}{end}", pair.number))
}

/// Arguments of qemu for all cards.
pub(super) fn arguments() -> Vec<String> {
    PAIRS.into_iter().flat_map(of_pair).collect()
}

fn of_pair(pair: Pair) -> Vec<String> {
    // A card that does not accept partial checksums cannot have receive segmentation offloads either.
    let offloads = if pair.receives_partial {
        ""
    } else {
        ",guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off"
    };
    let mut arguments = Vec::new();
    for (tap, mac) in taps(pair).iter().zip(pair.addresses()) {
        arguments.push("-netdev".to_owned());
        arguments
            .push(format!("tap,id={tap},ifname={tap},queues={QUEUES},script=no,downscript=no,vhost=off"));
        arguments.push("-device".to_owned());
        // Two interrupts for each queue pair, one for the control queue, one for changes of the configuration.
        let vectors = 2 * QUEUES + 2;
        arguments.push(format!(
            "virtio-net-pci,netdev={tap},mac={mac},mq=on,vectors={vectors},mrg_rxbuf=on,host_mtu={MTU},romfile={offloads}"
        ));
    }
    arguments
}
