//! The wire between the guest and another host, a network namespace of this machine.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use lb_tests::netns::{Netns, unique_prefix};
use lb_tests::resolver::Resolver;

/// The name of the Service in the DNS of its cluster domain.
const NAME: &str = "my-service.default.svc.cluster.local";
/// The guest is the other host's name server.
const RESOLV_CONF: &str = "nameserver 10.1.0.1\noptions timeout:5\n";
/// Commands that give the guest its address on the wire.
pub(super) const GUEST: &str = "ip address add 10.1.0.1/24 dev eth0 && ip link set eth0 up";
/// The TAP device at the other host's end of the wire.
const TAP: &str = "wire";

/// A host that is a client of the guest's Services. Dropping this value removes it.
pub(super) struct OtherHost {
    netns: Netns,
    resolver: Resolver,
}

impl OtherHost {
    /// Creates the host; writes its resolv.conf to `folder`.
    pub(super) fn create(folder: &Path) -> anyhow::Result<Self> {
        let netns = Netns::create(&unique_prefix())?;
        netns.ip(&format!(
            "tuntap add dev {TAP} mode tap\n\
             addr add 10.1.0.2/24 dev {TAP}\n\
             link set {TAP} up"
        ))?;
        let resolver = Resolver::configured(netns.clone(), folder, RESOLV_CONF)?;
        Ok(Self { netns, resolver })
    }

    /// A command on this host.
    pub(super) fn command(&self, program: &str) -> Command {
        self.netns.command(program)
    }

    /// Sends a request to the Service by its name; returns the address of the Service if the answer is the expected
    /// one.
    pub(super) fn reach_by_name(&self, expected: &str) -> anyhow::Result<String> {
        let entry = self.run(&["getent", "ahostsv4", NAME])?;
        self.expect_answer(NAME, expected)?;
        let address = entry.split_whitespace().next().context("getent prints no address")?;
        Ok(address.to_owned())
    }

    /// Sends requests to `host`, one after the other, until `work` has ended; fails unless each gets the expected
    /// answer. Returns the number of requests.
    pub(super) fn request_while(
        &self,
        host: &str,
        expected: &str,
        work: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let ended = AtomicBool::new(false);
        let requests = || {
            let mut sent = 0;
            while !ended.load(Ordering::Relaxed) {
                self.expect_answer(host, expected).with_context(|| format!("request {sent}"))?;
                sent += 1;
            }
            Ok(sent)
        };
        thread::scope(|scope| {
            let client = scope.spawn(requests);
            let worked = work();
            ended.store(true, Ordering::Relaxed);
            let sent = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            worked.and(sent)
        })
    }

    fn expect_answer(&self, host: &str, expected: &str) -> anyhow::Result<()> {
        let answer = self.request(host)?;
        ensure!(answer == expected, "the answer of {host} is {answer:?}");
        Ok(())
    }

    /// Fails if a request to `host` gets an answer.
    pub(super) fn expect_no_answer(&self, host: &str) -> anyhow::Result<()> {
        ensure!(self.request(host).is_err(), "{host} still answers");
        Ok(())
    }

    /// The body of the answer to an HTTP request.
    fn request(&self, host: &str) -> anyhow::Result<String> {
        self.run(&["curl", "--silent", "--show-error", "--fail", "--max-time", "5", host])
    }

    /// The output of a program that finds the guest's DNS server in its resolv.conf; fails if the program does.
    pub(super) fn run(&self, program: &[&str]) -> anyhow::Result<String> {
        let output = self.resolver.output(program).context("cannot start unshare")?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "`{}`: {}, {}", program.join(" "), output.status, error.trim());
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }
}

/// Arguments of qemu for the guest's network card.
pub(super) fn arguments() -> [String; 4] {
    [
        "-netdev".to_owned(),
        format!("tap,id=wire,ifname={TAP},script=no,downscript=no,vhost=off"),
        "-device".to_owned(),
        "virtio-net-pci,netdev=wire,romfile=".to_owned(),
    ]
}
