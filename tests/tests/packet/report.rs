//! What a failed comparison prints, and the pcap file that it leaves.

use std::{fmt::Write as _, fs, path::PathBuf};

/// Link types of pcap files (<https://www.tcpdump.org/linktypes.html>).
const LINKTYPE_ETHERNET: u32 = 1;
const LINKTYPE_RAW: u32 = 101;

/// Panics unless both are the same, with hexdumps and the path of a file that tcpdump or Wireshark reads: the packet
/// that went in, what came out, what was expected.
#[track_caller]
pub(crate) fn assert_same_packet(case: &str, ethernet: bool, input: &[u8], found: &[u8], wanted: &[u8]) {
    if found == wanted {
        return;
    }
    let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
    let offset = differs.unwrap_or(found.len().min(wanted.len()));
    let path = write_pcap(case, ethernet, &[input, found, wanted]);
    panic!(
        "{case}: the packets differ from offset {offset} on ({} octets, {} expected)\nfound:\n{}expected:\n{}\
         in, out and expected: {}",
        found.len(),
        wanted.len(),
        hexdump(found, wanted),
        hexdump(wanted, found),
        path.display()
    );
}

/// Sixteen octets a line; `>` marks those that `other` has not.
fn hexdump(octets: &[u8], other: &[u8]) -> String {
    let mut text = String::new();
    for (line, chunk) in octets.chunks(16).enumerate() {
        write!(text, "  {:04x} ", line * 16).unwrap();
        for (column, octet) in chunk.iter().enumerate() {
            let same = other.get(line * 16 + column) == Some(octet);
            write!(text, "{}{octet:02x}", if same { ' ' } else { '>' }).unwrap();
        }
        text.push('\n');
    }
    text
}

fn write_pcap(case: &str, ethernet: bool, packets: &[&[u8]]) -> PathBuf {
    let link_type = if ethernet { LINKTYPE_ETHERNET } else { LINKTYPE_RAW };
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, link_type] {
        file.extend(word.to_ne_bytes());
    }
    for (second, packet) in (0u32..).zip(packets) {
        let length = u32::try_from(packet.len()).unwrap();
        for word in [second, 0, length, length] {
            file.extend(word.to_ne_bytes());
        }
        file.extend(*packet);
    }
    let name: String =
        case.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(150).collect();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pcap"));
    fs::write(&path, file).unwrap();
    path
}
