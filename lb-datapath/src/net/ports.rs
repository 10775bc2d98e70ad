//! Reserves the source ports of masqueraded packets, so that the kernel does not give them to sockets of the node.
//!
//! The agent records the ports that it adds to `net.ipv4.ip_local_reserved_ports` as folders on the BPF file system,
//! `DIR/lb/ports/A-B`. Later it removes exactly the recorded ports, even if other software reserves ports.

use std::{collections::BTreeSet, fmt::Write as _, fs, io, ops::RangeInclusive, path::Path};

use tracing::info;

use crate::{
    bpf::bpffs::{self, Folder},
    error::DatapathError,
};

/// Default source ports of masqueraded packets: below the default port range of sockets in Linux (32768-60999), and
/// outside the default range of node ports in Kubernetes (30000-32767).
pub const DEFAULT_MASQUERADE_PORTS: RangeInclusive<u16> = 10_000..=29_999;

/// File with the range of ports that the kernel gives to unbound sockets of this network namespace.
const LOCAL_RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// File with the ports that the kernel never gives to unbound sockets.
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

type Ports = BTreeSet<u16>;

/// The reservation of source ports by one data plane, in the network namespace of this thread.
#[derive(Clone, Debug)]
pub struct PortReservation {
    folder: Folder,
}

impl PortReservation {
    pub(crate) const fn new(folder: Folder) -> Self {
        Self { folder }
    }

    /// Reserves these ports if the kernel could give one of them to a socket; removes earlier reservations that are not
    /// needed now. Returns whether a reservation is needed.
    pub fn keep(&self, ports: &RangeInclusive<u16>) -> Result<bool, DatapathError> {
        let wanted = if overlap(&local_range()?, ports) { ports.clone().collect() } else { Ports::new() };
        let (before, ours) = (reserved()?, self.marked()?);
        let plan = Plan::new(&before, &ours, &wanted);
        if plan.reserved != before {
            // The marks come first, because agents would never remove ports that were reserved without a mark.
            self.mark(&ours.union(&plan.ours).copied().collect())?;
            if let Err(error) = write(&plan.reserved) {
                self.mark(&ours)?;
                return Err(error);
            }
            info!(ports = text(&plan.ours), "changed net.ipv4.ip_local_reserved_ports");
        }
        if plan.ours != ours {
            self.mark(&plan.ours)?;
        }
        Ok(!wanted.is_empty())
    }

    /// Removes all reservations that agents have added. Returns the number of ports.
    pub(crate) fn release(&self) -> Result<usize, DatapathError> {
        let ours = self.marked()?;
        if ours.is_empty() {
            return Ok(0);
        }
        let before = reserved()?;
        let plan = Plan::new(&before, &ours, &Ports::new());
        if plan.reserved != before {
            write(&plan.reserved)?;
        }
        self.mark(&Ports::new())?;
        Ok(before.len() - plan.reserved.len())
    }

    /// The ports that agents have reserved, according to the folders that mark them. Ignores folders whose name is no
    /// range.
    fn marked(&self) -> Result<Ports, DatapathError> {
        let marks = bpffs::entries(&self.folder.ports())?;
        Ok(marks.iter().filter_map(|path| parse(path.file_name()?.to_str()?).ok()).flatten().collect())
    }

    /// Creates marks for exactly these ports, and removes all others.
    fn mark(&self, ports: &Ports) -> Result<(), DatapathError> {
        let folder = self.folder.ports();
        let names: BTreeSet<String> = ranges(ports).iter().map(range_text).collect();
        for name in &names {
            let path = folder.join(name);
            fs::create_dir_all(&path).map_err(|error| DatapathError::file("create", path, error))?;
        }
        let is_old = |path: &Path| !names.iter().any(|name| path.ends_with(name));
        for path in bpffs::entries(&folder)?.into_iter().filter(|path| is_old(path)) {
            fs::remove_dir(&path).map_err(|error| DatapathError::file("remove", path, error))?;
        }
        Ok(())
    }
}

/// Whether the kernel may give one of these ports to an unbound socket.
pub(crate) fn is_exposed(ports: &RangeInclusive<u16>) -> Result<bool, DatapathError> {
    let (range, reserved) = (local_range()?, reserved()?);
    Ok(ports.clone().any(|port| range.contains(&port) && !reserved.contains(&port)))
}

/// All ports that the kernel is to reserve (`reserved`), and the subset that only agents reserve (`ours`).
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    reserved: Ports,
    ours: Ports,
}

impl Plan {
    fn new(reserved: &Ports, ours: &Ports, wanted: &Ports) -> Self {
        let others: Ports = reserved.difference(ours).copied().collect();
        let ours = wanted.difference(&others).copied().collect();
        Self { reserved: others.union(&ours).copied().collect(), ours }
    }
}

fn overlap(a: &RangeInclusive<u16>, b: &RangeInclusive<u16>) -> bool {
    a.start() <= b.end() && b.start() <= a.end()
}

fn local_range() -> Result<RangeInclusive<u16>, DatapathError> {
    let text = read(LOCAL_RANGE)?;
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(first)), Some(Ok(last))) => Ok(first..=last),
        _ => Err(unreadable(LOCAL_RANGE, &text)),
    }
}

fn reserved() -> Result<Ports, DatapathError> {
    let text = read(RESERVED)?;
    parse(&text).ok().ok_or_else(|| unreadable(RESERVED, &text))
}

fn read(file: &str) -> Result<String, DatapathError> {
    fs::read_to_string(file).map_err(|error| DatapathError::file("read", file, error))
}

fn unreadable(file: &str, text: &str) -> DatapathError {
    DatapathError::file("parse", file, io::Error::other(format!("it contains {text:?}")))
}

/// Replaces the reserved ports in the kernel, and checks that the kernel has accepted them.
fn write(ports: &Ports) -> Result<(), DatapathError> {
    // The kernel ignores an empty write; a newline alone clears the list.
    let text = text(ports) + "\n";
    fs::write(RESERVED, text).map_err(|error| DatapathError::file("write", RESERVED, error))?;
    if reserved()? == *ports {
        return Ok(());
    }
    Err(DatapathError::file("write", RESERVED, io::Error::other("the kernel has not accepted all ports")))
}

/// Parses ports in the kernel's format, such as `8080,9000-9002`.
fn parse(text: &str) -> Result<Ports, std::num::ParseIntError> {
    let mut ports = Ports::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        ports.extend(first.parse::<u16>()?..=last.parse()?);
    }
    Ok(ports)
}

fn text(ports: &Ports) -> String {
    ranges(ports).iter().map(range_text).collect::<Vec<_>>().join(",")
}

fn range_text(range: &RangeInclusive<u16>) -> String {
    let mut text = range.start().to_string();
    if range.start() < range.end() {
        // Writing to a String cannot fail.
        write!(text, "-{}", range.end()).unwrap_or_default();
    }
    text
}

/// The ports as ranges, with adjacent ports in one range.
fn ranges(ports: &Ports) -> Vec<RangeInclusive<u16>> {
    let mut ranges: Vec<RangeInclusive<u16>> = Vec::new();
    for port in ports {
        match ranges.last_mut() {
            Some(range) if range.end().checked_add(1) == Some(*port) => *range = *range.start()..=*port,
            _ => ranges.push(*port..=*port),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_and_written_in_the_kernels_format() {
        for same in ["", "8080", "8080,9000-9002", "1-65535", "10000-29999,40000"] {
            assert_eq!(text(&parse(&format!("{same}\n")).unwrap()), same);
        }
        assert_eq!(text(&parse("7,5,6,1-2").unwrap()), "1-2,5-7");
        for bad in ["a", "1-b", "70000"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn reservations_of_others_stay_untouched() {
        for (what, reserved, ours, wanted, reserved_then, ours_then) in [
            ("nothing is needed", "8080", "", "", "8080", ""),
            ("beside others", "8080", "", "100-200", "100-200,8080", "100-200"),
            ("others have a part of it", "150-300", "", "100-200", "100-300", "100-149"),
            ("others have all of it", "1-1000", "", "100-200", "1-1000", ""),
            ("it is there already", "100-200,8080", "100-200", "100-200", "100-200,8080", "100-200"),
            ("others have overwritten it", "8080", "100-200", "100-200", "100-200,8080", "100-200"),
            ("another range", "100-200,8080", "100-200", "150-250", "150-250,8080", "150-250"),
            ("no longer needed", "100-200,8080", "100-200", "", "8080", ""),
            ("only ours is taken out", "100-300", "100-149", "", "150-300", ""),
            ("gone already", "8080", "100-149", "", "8080", ""),
        ] {
            let [reserved, ours, wanted] = [reserved, ours, wanted].map(|text| parse(text).unwrap());
            let plan = Plan::new(&reserved, &ours, &wanted);
            assert_eq!((&*text(&plan.reserved), &*text(&plan.ours)), (reserved_then, ours_then), "{what}");
        }
    }

    #[test]
    fn ranges_overlap_in_a_common_port() {
        for (a, b, expected) in
            [(1..=9, 9..=20, true), (1..=9, 10..=20, false), (5..=6, 1..=9, true), (10..=20, 1..=9, false)]
        {
            assert_eq!(overlap(&a, &b), expected, "{a:?} {b:?}");
        }
    }
}
